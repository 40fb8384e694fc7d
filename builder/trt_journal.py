"""What TensorRT says while it builds: messages kept for refusals and notes, phases shown as progress (offline)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorrt as trt


class Journal(trt.ILogger):  # type: ignore[misc]
    """Keeps errors and warnings, in order; TensorRT logs from several threads."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def log(self, severity: Any, msg: str) -> None:
        line = " ".join(msg.split())
        if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
            self.errors.append(line)
        elif severity == trt.ILogger.WARNING:
            self.warnings.append(line)

    @property
    def reason(self) -> str:
        """The last error, for a message of ours."""
        return self.errors[-1] if self.errors else "TensorRT gave no reason"


class PhaseProgress(trt.IProgressMonitor):  # type: ignore[misc]
    """Tells how far TensorRT is in its outermost phase; called from several of its threads."""

    def __init__(self, engine: str, heard: Callable[[str], None]) -> None:
        trt.IProgressMonitor.__init__(self)
        self._engine, self._heard = engine, heard
        self._phase, self._steps = "", 0
        self._lock = threading.Lock()

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        with self._lock:
            if not parent_phase:
                self._phase, self._steps = phase_name, num_steps
                self._tell(0)

    def step_complete(self, phase_name: str, step: int) -> bool:
        """Always True: a build that must stop is killed, and leaves nothing."""
        with self._lock:
            if phase_name == self._phase:
                self._tell(step + 1)
        return True

    def phase_finish(self, phase_name: str) -> None:
        with self._lock:
            if phase_name == self._phase:
                self._phase = ""

    def _tell(self, done: int) -> None:
        self._heard(f"{self._engine}: {self._phase}, {done} of {self._steps}")

"""A child of a benchmark, frozen while it is not its turn; one JSON line asks, one answers (runs per benchmark)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class FrozenProcess:
    """A command in a process group of its own, stopped (SIGSTOP) except while it answers. `log`: its stderr."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        with log.open("w") as stderr:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                env=environment,
            )
        self._signal(signal.SIGSTOP)

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any] | None:
        """Wake it, send one request, wait for the reply, freeze it again; None if it has ended."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            self._child.stdin.write(json.dumps({"op": operation, **arguments}) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        self._signal(signal.SIGSTOP)
        return json.loads(line) if line else None

    def exit_code(self) -> int | None:
        return self._child.poll()

    def close(self) -> None:
        """End the whole process group."""
        self._signal(signal.SIGKILL)
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)

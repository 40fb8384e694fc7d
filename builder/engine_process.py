"""Builds engines in a process of its own: an abort in TensorRT ends only that, and its memory goes back (offline)."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from ostinato.engines.engine_record import EngineInfo
from ostinato.engines.errors import BuildError

from .engine_job import EngineJob
from .termination import interrupts_held

Heard = Callable[[str, int, int], None]  # phase, step, steps
_PAGE = resource.getpagesize()
_MIB = 1 << 20
# What a build holds, as measured: mapped libraries and the optimizer's own, and copies of the weights (the file as
# read, the parser's, the optimizer's, the plan's).
BASE_BYTES = 300 * _MIB
WEIGHT_COPIES = 4
_SAID_CHARS = 300  # of TensorRT's last words
_MAIN = """
import sys
from multiprocessing.connection import Connection
from ostinato.builder.engine_process import serve
serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
"""


class EngineProcess:
    """One builder process; `close` when done.

    `max_memory`: bytes that this process and the builder may hold together, None for no bound. A job that is
    predicted to need more is refused before it starts; one that grows past it is cancelled.
    """

    def __init__(self, max_memory: int | None = None) -> None:
        if find_spec("tensorrt_rtx") is None:
            raise BuildError("TensorRT-RTX is not installed: run `pip install 'ostinato[rtx]'`, or choose target cpu")
        self._max_memory = max_memory
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (open until close)
        self._connection, theirs = multiprocessing.Pipe()
        # A fresh interpreter: a fork would inherit the locks of torch's threads, and its memory.
        with interrupts_held():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(max_memory or 0)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
            )
        theirs.close()

    def build(self, job: EngineJob, weight_bytes: int, heard: Heard) -> EngineInfo:
        """Build one engine of so many bytes of weights. Raises BuildError, also if the builder process dies."""
        self._refuse_if_too_large(job, weight_bytes)
        try:
            self._connection.send(job)
            while True:
                kind, *content = self._connection.recv()
                if kind == "phase":
                    heard(*content)
                elif kind == "done":
                    info: EngineInfo = content[0]
                    return info
                else:
                    raise BuildError(content[0])
        except (EOFError, ConnectionError):
            code = self._process.wait()
            raise BuildError(
                f"{job.name}: the TensorRT-RTX process ended with code {code}: {self._last_words()}"
            ) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the process, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._said.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _refuse_if_too_large(self, job: EngineJob, weight_bytes: int) -> None:
        if self._max_memory is None:
            return
        need = resident_bytes(os.getpid()) + BASE_BYTES + WEIGHT_COPIES * weight_bytes
        if need > self._max_memory:
            raise BuildError(
                f"{job.name} needs about {need // _MIB} MiB of host memory to build, --max-build-memory allows "
                f"{self._max_memory // _MIB}: raise it, or cut the model with shards.pipeline_parallel"
            )

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1][-_SAID_CHARS:] if lines else "it said nothing"


def resident_bytes(process: int) -> int:
    """Host memory that a process holds now."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE


def serve(connection: Connection, max_memory: int) -> None:
    """The builder process: one job after another until the pipe closes. `max_memory` 0 is no bound."""
    from .rtx_builder import build_engine  # here, so that only this process loads TensorRT

    parent = os.getppid()
    over = ""

    def watch(phase: str, step: int, steps: int) -> bool:
        nonlocal over
        connection.send(("phase", phase, step, steps))
        held = resident_bytes(os.getpid()) + resident_bytes(parent)
        if 0 < max_memory < held:
            over = f"holds {held // _MIB} MiB of host memory, --max-build-memory allows {max_memory // _MIB}: raise it"
        return not over

    while True:
        try:
            job: EngineJob = connection.recv()
            over = ""
            connection.send(("done", build_engine(job, watch)))
        except BuildError as error:
            connection.send(("refused", f"{job.name}: the build {over}" if over else str(error)))
        except (EOFError, ConnectionError):  # the other side is gone, or done with us
            return

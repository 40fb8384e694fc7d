"""The process of a rank other than 0: does what rank 0 does, call by call (started by it, ends with it).

python -P -m ostinato.runtime.rank_process MEMORY REPORTS PARENT < setup
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
import threading
import traceback
from typing import Any

from ostinato.engines.errors import DeviceError, OstinatoError

from .batch_bytes import batch_from, sampled_bytes, table_from
from .executor import Executor, Ticket
from .nccl import NcclLinks
from .rank import CLOSE, MASKS, RESULT, STEP, WAIT, RankSetup, Rings
from .shared_ring import RingReader, RingWriter

BEAT_S = 0.1
_PR_SET_PDEATHSIG = 1
_MAX_TEXT = 1000  # a report is written at once, whoever else writes one


class Reports:
    """Lines to rank 0: how far the start is, that the rank is ready, or why it can't go on. From any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def progress(self, what: str, done: int, total: int) -> None:
        self._write(progress=[what[:_MAX_TEXT], done, total])

    def ready(self) -> None:
        self._write(ready=True)

    def error(self, error: Exception) -> None:
        kind = type(error).__name__
        text = str(error) if isinstance(error, OstinatoError) else f"failed inside, {kind}: {error}"
        self._write(error=[kind, " ".join(text.split())[:_MAX_TEXT]])

    def _write(self, **report: Any) -> None:
        os.write(self._descriptor, json.dumps(report).encode() + b"\n")


class RankProcess:
    """`run` mirrors rank 0's calls until it closes. Any error ends it, and with it the model."""

    def __init__(self, setup: RankSetup, rings: Rings, reports: Reports) -> None:
        self._setup, self._rings, self._reports = setup, rings, reports
        self._reader = RingReader(rings.steps, setup.rank - 1)
        self._results = RingWriter(rings.results) if setup.hands_back and rings.results is not None else None
        self._links: NcclLinks | None = None
        self._tickets: dict[int, Ticket] = {}

    def run(self) -> None:
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        libraries = self._setup.libraries()
        self._links = links = self._setup.connect(libraries, _go_on)
        executor = self._setup.executor(libraries, links, self._reports.progress)
        self._reports.ready()
        while self._handle(executor):
            pass
        executor.close()
        links.close()

    def _handle(self, executor: Executor) -> bool:
        """The next message; False for the last."""
        kind, number, words = self._reader.take(_go_on)
        if kind == STEP:
            self._tickets[number] = executor.run(batch_from(words))
        elif kind == MASKS:
            self._tickets[number].sample(table_from(words))
        elif kind == WAIT:
            sampled = self._tickets.pop(number).wait()
            if self._results is not None:
                self._results.put(RESULT, number, sampled_bytes(sampled), _go_on)
        self._reader.let_go()
        return kind != CLOSE

    def _beat(self) -> None:
        """Tell that the process runs, and what NCCL says of the peers, once."""
        is_told = False
        wait = threading.Event()
        while not wait.wait(BEAT_S):
            self._rings.steps.beat(self._setup.rank - 1)
            if not is_told and self._links is not None and (error := _error_of(self._links)) is not None:
                self._reports.error(error)
                is_told = True


def main() -> None:
    descriptor, reports_to, parent = map(int, sys.argv[1:])
    _end_with(parent)
    for asked in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; rank 0, which may drain, ends this one
        signal.signal(asked, signal.SIG_IGN)
    reports = Reports(reports_to)
    try:
        setup: RankSetup = pickle.load(sys.stdin.buffer)
        RankProcess(setup, Rings.at(descriptor, setup.bundle, setup.limits), reports).run()
    except Exception as error:
        if not isinstance(error, OstinatoError):
            traceback.print_exc()
        reports.error(error)
        sys.stderr.flush()
        os._exit(1)  # whatever the GPU's library would still wait for


def _end_with(parent: int) -> None:
    """Be killed when the thread that started this process ends, even if this one is stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _error_of(links: NcclLinks) -> DeviceError | None:
    try:
        text = links.error()
    except DeviceError as error:
        return error
    return None if text is None else DeviceError(text)


def _go_on() -> None:
    """This process waits without an end: rank 0 ends it."""


if __name__ == "__main__":
    main()

"""Watches the other ranks' processes: starts them, hears their reports, and ends all when one fails (a thread)."""

from __future__ import annotations

import json
import logging
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.engines.errors import BundleError, DeviceError, OstinatoError

from .nccl import NcclLinks
from .progress import Show
from .rank import RankSetup
from .shared_ring import RingWriter

STALL_S = 3.0
_IDLE_STALLS, _START_STALLS = 3, 20  # times that: for a rank that nobody waits for, and for one that starts
_TICK_S = 0.05
_GRACE_S = 0.5  # a rank that dies makes others fail: wait for the death to show before one of those is blamed
_END_S = 10.0
_ORDERLY = "ended with exit code 0"
_ADVICE = "restart the server; its log tells more"

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Rank:
    """One child. `beat_age`, `work_age`: seconds since it last beat, and since it last got on with what it has."""

    number: int
    process: subprocess.Popen[bytes]
    reports: int
    rest: bytes = b""
    is_ready: bool = False
    has_ended: bool = False
    error: tuple[str, str] | None = None
    beats: int = -1
    beat_age: float = 0.0
    num_read: int = -1
    work_age: float = 0.0


class _Verdict:
    """What is known against the model's health. A suspicion becomes the error unless a better one comes soon."""

    def __init__(self) -> None:
        self.error: OstinatoError | None = None
        self.is_final = threading.Event()
        self._suspicion: OstinatoError | None = None
        self._suspected_s = 0.0

    @property
    def is_clean(self) -> bool:
        return self._suspicion is None

    def suspect(self, error: OstinatoError) -> None:
        self._suspicion = self._suspicion or error

    def decide(self, error: OstinatoError) -> None:
        self.error = self.error or error
        self.is_final.set()

    def pass_time(self, seconds: float) -> None:
        if self._suspicion is not None:
            self._suspected_s += seconds
            if self._suspected_s > _GRACE_S:
                self.decide(self._suspicion)


class RankWatch:
    """Everything but the thread's own methods may be called from any thread.

    The children live as long as this thread: the system kills them when it ends, however that is.
    """

    def __init__(
        self, setups: Sequence[RankSetup], descriptor: int, steps: RingWriter, show: Show, stall_s: float
    ) -> None:
        self._setups, self._descriptor, self._steps, self._show = setups, descriptor, steps, show
        self._stall_s = stall_s
        self.links: NcclLinks | None = None  # of rank 0
        self.is_open = False  # rank 0 is ready, too
        self.pids: tuple[int, ...] = ()
        self._ranks: list[_Rank] = []
        self._verdict = _Verdict()
        self._is_ready, self._is_closing = threading.Event(), threading.Event()
        self._closing_s = 0.0
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    @property
    def error(self) -> OstinatoError | None:
        """Why the model can't run any more."""
        return self._verdict.error

    def raise_error(self) -> None:
        if (error := self._verdict.error) is not None:
            raise type(error)(str(error))

    def is_ready(self) -> bool:
        """Whether every other rank waits for steps."""
        return self._is_ready.is_set()

    def failed(self, error: Exception) -> OstinatoError:
        """Rank 0 itself failed, perhaps because another did: which it is, once it is known."""
        text = str(error) if isinstance(error, OstinatoError) else f"failed inside, {type(error).__name__}: {error}"
        kind = BundleError if isinstance(error, BundleError) else DeviceError
        self._verdict.suspect(kind(f"rank 0: {text}"))
        self._verdict.is_final.wait(4 * _GRACE_S)
        return self._verdict.error or DeviceError(text)

    def expect_end(self) -> None:
        """From now on a rank that ends is not missed."""
        self._is_closing.set()

    def close(self, *, is_orderly: bool) -> None:
        """Wait until every rank has ended, or end it."""
        self.expect_end()
        if not is_orderly:
            self._kill()
        self._thread.join(2 * _END_S)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                for setup in self._setups:
                    self._ranks.append(rank := self._start(setup))
                    selector.register(rank.reports, selectors.EVENT_READ, rank)
                self.pids = tuple(rank.process.pid for rank in self._ranks)
                self._watch(selector)
            except Exception as error:  # not to know how they are is trouble, too
                logger.critical("the watch of the ranks failed", exc_info=True)
                self._verdict.decide(DeviceError(f"can't watch the ranks: {error}: {_ADVICE}"))
            finally:
                self._finish()

    def _start(self, setup: RankSetup) -> _Rank:
        reports, reports_to = os.pipe()
        os.set_blocking(reports, False)
        command = [sys.executable, "-P", "-m", "ostinato.runtime.rank_process"]
        command += [str(self._descriptor), str(reports_to), str(os.getpid())]
        try:
            with os.fdopen(os.memfd_create("ostinato-setup"), "w+b") as told:  # a pipe would wait for its reader
                pickle.dump(setup, told)
                told.seek(0)
                process = subprocess.Popen(command, stdin=told, stdout=2, pass_fds=(self._descriptor, reports_to))
        except BaseException:
            os.close(reports)
            raise
        finally:
            os.close(reports_to)
        return _Rank(setup.rank, process, reports)

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Until all have ended as they should, or one has not."""
        before = time.monotonic()
        verdict = self._verdict
        while verdict.error is None and not (verdict.is_clean and all(rank.has_ended for rank in self._ranks)):
            for key, _ in selector.select(_TICK_S):
                self._hear(key.data)
                if key.data.has_ended:
                    selector.unregister(key.fd)
            now = time.monotonic()
            passed, before = min(now - before, 4 * _TICK_S), now  # what this process slept through does not count
            self._judge(passed)

    def _hear(self, rank: _Rank) -> None:
        try:
            content = os.read(rank.reports, 1 << 16)
        except BlockingIOError:
            return
        if not content:
            rank.has_ended = True
            return
        *lines, rank.rest = (rank.rest + content).split(b"\n")
        for line in lines:
            report: dict[str, Any] = json.loads(line)
            if "progress" in report and not self._is_ready.is_set():
                what, done, total = report["progress"]
                self._show(f"rank {rank.number}: {what}", done, total)
            rank.is_ready |= "ready" in report
            if "error" in report and rank.error is None:
                rank.error = tuple(report["error"])
        if all(one.is_ready for one in self._ranks):
            self._is_ready.set()

    def _judge(self, passed: float) -> None:
        verdict = self._verdict
        for rank in self._ranks:
            if rank.has_ended and rank.error is None:
                if (end := _end_of(rank.process)) != _ORDERLY or not self._is_closing.is_set():
                    verdict.decide(DeviceError(f"rank {rank.number} {end}: {_ADVICE}"))
            elif rank.error is not None:
                kind = BundleError if rank.error[0] == "BundleError" else DeviceError
                verdict.suspect(kind(f"rank {rank.number}: {rank.error[1]}"))
        if (stalled := self._stalled(passed)) is not None and verdict.is_clean:
            verdict.decide(DeviceError(stalled))
        if self.links is not None and (text := self.links.error()) is not None:
            verdict.suspect(DeviceError(f"rank 0: {text}"))
        verdict.pass_time(passed)
        self._closing_s += passed if self._is_closing.is_set() else 0.0
        if self._closing_s > _END_S:
            verdict.decide(DeviceError(f"the ranks did not end within {_END_S:g} s: {_ADVICE}"))

    def _stalled(self, passed: float) -> str | None:
        """Which rank does not get on with its work, or does not run; one that does not even beat is named first."""
        stuck: list[_Rank] = []
        for rank in self._ranks:
            beats, num_read = self._steps.ring.beats(rank.number - 1), self._steps.ring.num_read(rank.number - 1)
            rank.beat_age = 0.0 if beats != rank.beats else rank.beat_age + passed
            has_work = self._is_ready.is_set() and num_read < self._steps.num_written
            rank.work_age = 0.0 if num_read != rank.num_read or not has_work else rank.work_age + passed
            rank.beats, rank.num_read = beats, num_read
            is_still = rank.beat_age > self._stall_s and rank.work_age > _GRACE_S
            patience_s = self._stall_s * (_IDLE_STALLS if rank.is_ready else _START_STALLS)
            if (is_still or rank.work_age > self._stall_s or rank.beat_age > patience_s) and not rank.has_ended:
                stuck.append(rank)
        if not stuck:
            return None
        worst = max(stuck, key=lambda rank: rank.beat_age)
        if worst.beat_age > self._stall_s / 2:
            return f"rank {worst.number} has not run for {worst.beat_age:.1f} s: {_ADVICE}"
        return f"rank {worst.number} has got no further with a step for {self._stall_s:g} s: {_ADVICE}"

    def _finish(self) -> None:
        """Let go of what waits for a rank, end every one, and collect them."""
        error = self._verdict.error
        if error is not None:
            if self.is_open:  # else whoever opens the model is told
                logger.critical("the model can't go on: %s", error)
            self._kill()
            if self.links is not None:
                try:
                    self.links.abort()
                except DeviceError as refusal:
                    logger.warning("%s", refusal)
        for rank in self._ranks:
            try:
                rank.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            os.close(rank.reports)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()


def _end_of(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return "closed its reports"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

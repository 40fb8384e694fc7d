"""The loop: inbox → plan → pack → run → commit, on its own thread or driven by a caller (lines run per step)."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from ostinato.engines.errors import OstinatoError, RequestError

from .batch import Packer
from .executor import Executor
from .plan import Plan
from .request import Event, Request
from .scheduler import Scheduler

STALL_SECONDS = 10.0  # steps are chunked, so even a long prefill is far below
MAX_FAILURES_IN_A_ROW = 3
STEP_FAILED = "internal_error"

logger = logging.getLogger(__name__)


class StepTimes(NamedTuple):
    """What a step held, and the seconds that its parts took."""

    num_rows: int
    num_tokens: int
    plan: float
    pack: float
    run: float
    commit: float


StepObserver = Callable[[StepTimes], None]


class Sink(Protocol):
    """Where a running loop's events go; both are called on the loop's thread."""

    def emit(self, events: list[Event]) -> None:
        """Take the events of one step."""
        ...

    def ended(self) -> None:
        """No event will come any more."""
        ...


class Loop:
    """Runs requests in steps. `submit` and `abort` may be called from any thread, everything else from its driver.

    The driver is either the loop's own thread (`start`) or a caller who wants the events (`run_until_idle`).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        packer: Packer,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.observe_step: StepObserver | None = None
        self._packer = packer
        self._executor = executor
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], Event | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._is_busy = False
        self._progress_at = clock()
        self._failures_in_a_row = 0

    def submit(self, request: Request) -> None:
        """Queue a request for the next step."""
        self._inbox.put(partial(self.scheduler.submit, request))

    def abort(self, request_id: int) -> None:
        """Take a request out before the next step. Nothing happens if it has ended."""
        self._inbox.put(partial(self.scheduler.abort, request_id))

    def step(self) -> list[Event]:
        """One step of every request that has its turn: at most one event each."""
        events = self._drain_inbox()
        started = self._clock()
        plan = self.scheduler.plan()
        if plan is None:
            return events
        planned = self._clock()
        try:
            batch = self._packer.pack(plan)
            packed = self._clock()
            sampled = self._executor.run(batch).wait()
        except Exception as error:
            return events + self._fail(plan, error)
        except BaseException:  # Ctrl-C in a caller's own step: the books must be right for what it does next
            self.scheduler.fail(plan, RequestError("the step was interrupted", code=STEP_FAILED))
            raise
        ran = self._clock()
        self._failures_in_a_row = 0
        events += self.scheduler.commit(plan, sampled)
        if self.observe_step is not None:
            spans = (planned - started, packed - planned, ran - packed, self._clock() - ran)
            self.observe_step(StepTimes(len(plan.rows), plan.num_tokens, *spans))
        return events

    def _drain_inbox(self, *, wait: bool = False) -> list[Event]:
        """Do what was asked for meanwhile; with `wait`, sleep until something is."""
        events = []
        while wait or not self._inbox.empty():
            wait = False
            if (event := self._inbox.get()()) is not None:
                events.append(event)
        return events

    def _fail(self, plan: Plan, error: Exception) -> list[Event]:
        """End the requests of a step that failed, and only those."""
        self._failures_in_a_row += 1
        logger.error("a step failed, its %d requests end: %s", len(plan.rows), error, exc_info=error)
        reason = str(error) if isinstance(error, OstinatoError) else "the step failed inside the server"
        return self.scheduler.fail(plan, RequestError(reason, code=STEP_FAILED))

    def run_until_idle(self) -> Iterator[list[Event]]:
        """Drive the loop on the caller's thread; yields each step's events until no request is left."""
        assert self._thread is None, "the loop has its own thread"
        while not (self.scheduler.is_idle and self._inbox.empty()):
            yield self.step()
        self.scheduler.pages.check_integrity()

    def start(self, sink: Sink) -> None:
        """Drive the loop on a thread of its own until `stop`."""
        assert self._thread is None, "the loop was started before"
        self._thread = threading.Thread(target=self._run, args=(sink,), name="loop", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that is running; requests that are left get no more events."""
        if self._thread is not None:
            self._inbox.put(self._stop)
            self._thread.join(STALL_SECONDS)

    def _stop(self) -> None:
        self._is_stopping = True

    def _run(self, sink: Sink) -> None:
        try:
            while not self._is_stopping:
                events = self._sleep() if self.scheduler.is_idle and self._inbox.empty() else []
                events += self.step()
                self._progress_at = self._clock()
                if events:
                    sink.emit(events)
        except Exception:
            logger.critical("the loop ended, its own state is broken", exc_info=True)
        finally:
            sink.ended()

    def _sleep(self) -> list[Event]:
        """Check the books and wait for a request."""
        self.scheduler.pages.check_integrity()
        self._is_busy = False
        events = self._drain_inbox(wait=True)
        self._progress_at = self._clock()
        self._is_busy = True
        return events

    @property
    def is_alive(self) -> bool:
        """Whether a thread drives the loop."""
        return self._thread is not None and self._thread.is_alive()

    def trouble(self) -> str | None:
        """Why the loop can't be relied on now, None if it can. May be read from any thread."""
        if not self.is_alive:
            return "the loop is not running"
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            return f"the last {self._failures_in_a_row} steps failed"
        if self._is_busy and self._clock() - self._progress_at > STALL_SECONDS:
            return f"no step has finished for {STALL_SECONDS:.0f} s"
        return None

    def close(self) -> None:
        """Stop, and release the executor unless it hangs in a step."""
        self.stop()
        if not self.is_alive:
            self._executor.close()

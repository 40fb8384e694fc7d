"""The loop: inbox → plan → pack → launch, wait → commit, on its own thread or driven by a caller (lines run per step).

host, two in flight    plan 1 │ plan 2 │ wait 1 │ commit 1, plan 3 │ wait 2 │ commit 2, plan 4 │ …
device                        │ step 1 ──────── │ step 2 ───────────────── │ step 3 ───────────
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from ostinato.engines.errors import OstinatoError, RequestError
from ostinato.plugins.sampling_rows import Sampled

from .batch import Packer
from .executor import Executor
from .flight import Flight, StepTimes
from .request import STEP_FAILED, Event, Request
from .scheduler import Scheduler
from .timeline import LoopClock

STALL_SECONDS = 10.0  # steps are chunked, so even a long prefill is far below
MAX_FAILURES_IN_A_ROW = 3

logger = logging.getLogger(__name__)


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
        self.clock = LoopClock(clock)
        self.observe_step: StepObserver | None = None
        self._packer = packer
        self._executor = executor
        self._clock = clock
        self.rules = executor.rules
        self._flights: deque[Flight] = deque()
        self._events: list[Event] = []  # for whoever drives the next step: an interrupt may keep them from this one's
        self._inbox: queue.SimpleQueue[Callable[[], Event | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._is_busy = False
        self._progress_at = clock()
        self._failures_in_a_row = 0
        self._grammar_seconds = 0.0  # up to the step that landed last

    def submit(self, request: Request) -> None:
        """Queue a request for the next step."""
        self._inbox.put(partial(self.scheduler.submit, request))

    def abort(self, request_id: int) -> None:
        """Take a request out before the next step. Nothing happens if it has ended."""
        self._inbox.put(partial(self.scheduler.abort, request_id))

    def ask(self, question: Callable[[], None]) -> None:
        """Have `question` look at the scheduler between two steps, on the loop's thread. It must not raise."""
        self._inbox.put(question)

    def step(self) -> list[Event]:
        """Launch what the executor has room for, then wait for the oldest step: at most one event a request of it."""
        self.clock.enter("plan")
        self._drain_inbox()
        if (trouble := self._executor.trouble) is not None:
            self._give_up(trouble)
        else:
            while self._has_room() and self._launch():
                pass
            if self._flights:
                self._land()
        events, self._events = self._events, []
        return events

    def _has_room(self) -> bool:
        """Whether one more step may be launched; none behind one that failed, which has no tokens to feed it."""
        flights = self._flights
        return len(flights) < self.rules.num_in_flight and not (flights and flights[-1].error is not None)

    def _launch(self) -> bool:
        """The next step, if there is one now."""
        plan = self.scheduler.plan()
        self.clock.wait_for(self.scheduler.waiting_reason)
        if plan is None:
            return False
        flight = Flight(plan)
        self._flights.append(flight)
        try:
            flight.launch(self._packer, self._executor, self.clock)
        except Exception as error:
            flight.error = error
        except BaseException:
            self._interrupt(flight)
            raise
        return True

    def _land(self) -> None:
        """Take the oldest step's outcome in; the next one can then be sampled."""
        flight = self._flights[0]
        self.clock.enter("wait")
        try:
            sampled = flight.wait()
        except Exception as error:
            self._fail(flight, error)
        except BaseException:
            self._interrupt(flight)
            raise
        else:
            self._commit(flight, sampled)
        self._sample_next()

    def _commit(self, flight: Flight, sampled: Sampled) -> None:
        clock = self.clock
        wait = clock.enter("commit")
        landed_at = clock.entered_at
        self._flights.popleft()
        self._failures_in_a_row = 0
        self._events += self.scheduler.commit(flight.plan, sampled)
        if self.observe_step is not None:
            commit = clock.enter("commit")
            grammar, self._grammar_seconds = self._grammar_seconds, clock.seconds("grammar")
            self.observe_step(flight.times(wait, commit, self._grammar_seconds - grammar, landed_at))

    def _sample_next(self) -> None:
        """Give the oldest step the masks that hung on the one before it."""
        if not self._flights:
            return
        flight = self._flights[0]
        try:
            flight.sample(self._packer, self.clock)
        except Exception as error:
            flight.error = error
        except BaseException:
            self._interrupt(flight)
            raise

    def _fail(self, flight: Flight, error: Exception) -> None:
        """End the requests of a step that failed, and only those."""
        self._flights.popleft()
        self._failures_in_a_row += 1
        if not isinstance(error, RequestError):  # that of an interrupt, which the caller knows of
            logger.error("a step failed, its %d requests end: %s", flight.plan.num_rows, error, exc_info=error)
        reason = str(error) if isinstance(error, OstinatoError) else "the step failed inside the server"
        self._events += self.scheduler.fail(flight.plan, RequestError(reason, code=STEP_FAILED))

    def _interrupt(self, flight: Flight) -> None:
        """Ctrl-C in a caller's own step: its requests end, so that the books are right for what he does next."""
        flight.error = RequestError("the step was interrupted: ask again", code=STEP_FAILED)
        if flight is self._flights[0]:  # else it lands, as failed, in its turn
            self._flights.popleft()
            self._events += self.scheduler.fail(flight.plan, flight.error)
            self._sample_next()

    def _give_up(self, trouble: str) -> None:
        """End every request: the executor runs no step any more."""
        self._flights.clear()
        events = self.scheduler.fail_all(RequestError(trouble, code=STEP_FAILED))
        if events:
            logger.error("%d requests end: %s", len(events), trouble)
        self._events += events

    def _drain_inbox(self, *, wait: bool = False) -> None:
        """Do what was asked for meanwhile; with `wait`, sleep until something is."""
        while wait or not self._inbox.empty():
            wait = False
            if (event := self._inbox.get()()) is not None:
                self._events.append(event)

    def _is_idle(self) -> bool:
        """Whether a step would do nothing and tell nothing."""
        return self.scheduler.is_idle and self._inbox.empty() and not self._events

    def run_until_idle(self) -> Iterator[list[Event]]:
        """Drive the loop on the caller's thread; yields each step's events until no request is left."""
        assert self._thread is None, "the loop has its own thread"
        while not self._is_idle():
            events = self.step()
            self.clock.enter("idle")
            yield events
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
                if self._is_idle():
                    self._sleep()
                events = self.step()
                self._progress_at = self._clock()
                if events:
                    sink.emit(events)
        except Exception:
            logger.critical("the loop ended, its own state is broken", exc_info=True)
        finally:
            sink.ended()

    def _sleep(self) -> None:
        """Check the books and wait for a request."""
        self.scheduler.pages.check_integrity()
        self.clock.enter("idle")
        self._is_busy = False
        self._drain_inbox(wait=True)
        while self._is_idle() and not self._is_stopping:  # somebody only looked
            self._drain_inbox(wait=True)
        self._progress_at = self._clock()
        self._is_busy = True

    @property
    def is_alive(self) -> bool:
        """Whether a thread drives the loop."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_lost(self) -> bool:
        """Whether no step will ever run again, though one was to. May be read from any thread."""
        return self._thread is not None and (not self._thread.is_alive() or self._executor.trouble is not None)

    def trouble(self) -> str | None:
        """Why the loop can't be relied on now, None if it can. May be read from any thread."""
        if not self.is_alive:
            return "the loop is not running"
        if (trouble := self._executor.trouble) is not None:
            return trouble
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

"""Where a request's time goes while the loop has it: the loop's own time by phase, cut at the request's turns.

loop       plan│pack│launch│wait      │commit│plan│pack│…           every moment belongs to one phase
request    queue ────────┤ prefill ─────────┤ decode ──── … ─┤      a turn reads the totals; between two is its own time

So a step costs nothing per request: whoever runs in it waited for all of it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

PHASES = ("idle", "plan", "grammar", "pack", "launch", "wait", "commit")
REASONS = ("turn", "slots", "blocks", "budget", "tenant")  # why who waits has to; turn: for the next plan alone


class Stage(enum.Enum):
    """What a request is at while the loop has it."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


Snapshot = tuple[tuple[float, ...], tuple[float, ...]]  # seconds so far by phase and by reason


class LoopClock:
    """Cuts the time of the loop's thread into phases without gaps, and the same time by what makes waiters wait."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._reasons = dict.fromkeys(REASONS, 0.0)
        self._phase = "idle"
        self._reason = "turn"
        self._last = now()

    def enter(self, phase: str) -> float:
        """A phase begins; returns how long the one before took since it was entered or snapped, in seconds."""
        seconds = self._charge()
        self._phase = phase
        return seconds

    def wait_for(self, reason: str) -> None:
        """From now on, who waits does so for `reason`."""
        if reason != self._reason:
            self._charge()
            self._reason = reason

    def snap(self) -> Snapshot:
        """The totals up to this moment."""
        self._charge()
        return tuple(self._phases.values()), tuple(self._reasons.values())

    def _charge(self) -> float:
        now = self.now()
        seconds = now - self._last
        self._last = now
        self._phases[self._phase] += seconds
        self._reasons[self._reason] += seconds
        return seconds


class Timeline:
    """One request's turns, on the loop's thread. `spans`: seconds by stage and, in it, by phase or reason to wait.

    The spans of a request that has ended add up to `ended_at` - `began_at`; `first_token_at` 0: it gave none.
    """

    __slots__ = ("_clock", "_last", "_stage", "began_at", "ended_at", "first_token_at", "spans")

    def __init__(self, clock: LoopClock) -> None:
        self.spans: dict[tuple[Stage, str], float] = {}
        self.began_at = self.first_token_at = self.ended_at = 0.0
        self._clock = clock
        self._stage: Stage | None = None
        self._last: Snapshot = ((), ())

    def turn(self, stage: Stage) -> None:
        """The request comes to a stage: first of all to the queue, and there again when it is preempted."""
        self._account()
        now = self._clock.now()
        if self._stage is None:
            self.began_at = now
        elif stage is Stage.DECODE and not self.first_token_at:
            self.first_token_at = now
        self._stage = stage

    def end(self) -> None:
        """Its last event is made, or nobody wants one."""
        if self._stage is not None and not self.ended_at:
            self._account()
            self.ended_at = self._clock.now()

    def _account(self) -> None:
        snapshot = self._clock.snap()
        if self._stage is not None:
            is_queue = self._stage is Stage.QUEUE
            for name, now, before in zip(
                REASONS if is_queue else PHASES, snapshot[is_queue], self._last[is_queue], strict=True
            ):
                if now > before:
                    self.spans[self._stage, name] = self.spans.get((self._stage, name), 0.0) + now - before
        self._last = snapshot

"""Where a request's time goes while the loop has it: the loop's own time by phase, cut at the request's turns.

loop       plan│pack│launch│wait      │commit│plan│pack│…           every moment belongs to one phase
request    queue ────────┤ prefill ─────────┤ decode ──── … ─┤      a turn keeps the totals; between two is its own time

So a step costs nothing per request: whoever runs in it waited for all of it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

PHASES = ("idle", "plan", "grammar", "pack", "launch", "wait", "commit")
REASONS = ("turn", "slots", "blocks", "budget", "tenant")  # why who waits has to; turn: for the next plan alone
_PLACES = {name: place for names in (PHASES, REASONS) for place, name in enumerate(names)}


class Stage(enum.StrEnum):  # whose hash is its text's, and costs nothing
    """What a request is at while the loop has it."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


class Snapshot(NamedTuple):
    """The loop's seconds up to one moment, by phase and by reason; both add up to `at` since the clock was made."""

    at: float
    phases: Sequence[float]
    reasons: Sequence[float]


class LoopClock:
    """Cuts the time of the loop's thread into phases without gaps, and the same time by what makes waiters wait."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._phases = [0.0] * len(PHASES)
        self._reasons = [0.0] * len(REASONS)
        self._phase = self._reason = 0  # the ones that run, by place
        self._began_at = self._entered_at = self._waiting_since = now()

    def enter(self, phase: str) -> float:
        """A phase begins; returns the seconds of the one before, but for what was charged elsewhere."""
        now = self.now()
        seconds = now - self._entered_at
        self._phases[self._phase] += seconds
        self._phase = _PLACES[phase]
        self._entered_at = now
        return seconds

    def charge(self, phase: str, seconds: float) -> None:
        """Of the phase that runs, `seconds` belong to another one."""
        self._phases[_PLACES[phase]] += seconds
        self._entered_at += seconds

    def wait_for(self, reason: str) -> None:
        """From now on, who waits does so for `reason`."""
        place = _PLACES[reason]
        if place != self._reason:
            now = self.now()
            self._reasons[self._reason] += now - self._waiting_since
            self._reason = place
            self._waiting_since = now

    @property
    def entered_at(self) -> float:
        """When the phase that runs began."""
        return self._entered_at

    @property
    def reason(self) -> str:
        """Why who waits now has to."""
        return REASONS[self._reason]

    def seconds(self, phase: str) -> float:
        """The total of a phase that does not run."""
        return self._phases[_PLACES[phase]]

    def snap(self) -> Snapshot:
        """The totals up to this moment. From another thread a moment may be told to the phase beside it, never lost.

        Totals are copied in one go, and what they add up to says up to when: what is missing runs now.
        """
        phase, reason = self._phase, self._reason
        phases, reasons = self._phases[:], self._reasons[:]
        now = self.now()
        elapsed = now - self._began_at
        phases[phase] += elapsed - sum(phases)
        reasons[reason] += elapsed - sum(reasons)
        return Snapshot(now, phases, reasons)


class Turn(NamedTuple):
    """A request comes to a stage."""

    stage: Stage
    snapshot: Snapshot


class Timeline:
    """One request's turns, kept on the loop's thread; they may be read on any."""

    __slots__ = ("_clock", "turns")

    def __init__(self, clock: LoopClock) -> None:
        self.turns: list[Turn] = []
        self._clock = clock

    @property
    def clock(self) -> LoopClock:
        return self._clock

    def turn(self, stage: Stage) -> None:
        """The request comes to a stage: first of all to the queue, and there again when it is preempted."""
        self.turns.append(Turn(stage, self._clock.snap()))

    def count(self, stage: Stage) -> int:
        """How often the request came to a stage."""
        return sum(turn.stage is stage for turn in self.turns)

    def cut(self, end: Snapshot) -> list[Segment]:
        """What lies between its turns up to `end`, without gaps; nothing if the loop had not taken it in by then."""
        turns = [turn for turn in self.turns if turn.snapshot.at <= end.at]
        ends = [turn.snapshot for turn in turns[1:]] + [end]
        return [Segment(*turn, until) for turn, until in zip(turns, ends, strict=False)]


@contextmanager
def guiding(timeline: Timeline | None) -> Iterator[None]:
    """What happens inside is a grammar's, whatever the loop is at."""
    if timeline is None:
        yield
        return
    clock = timeline.clock
    began_at = clock.now()
    try:
        yield
    finally:
        clock.charge("grammar", clock.now() - began_at)


class Segment(NamedTuple):
    """A stretch of a request at one stage."""

    stage: Stage
    start: Snapshot
    end: Snapshot

    @property
    def began_at(self) -> float:
        return self.start.at

    @property
    def ended_at(self) -> float:
        return self.end.at

    @property
    def spans(self) -> dict[str, float]:
        """Its seconds by phase, or by reason to wait; they add up."""
        names: tuple[str, ...] = PHASES
        before, after = self.start.phases, self.end.phases
        if self.stage is Stage.QUEUE:
            names, before, after = REASONS, self.start.reasons, self.end.reasons
        return {name: late - early for name, early, late in zip(names, before, after, strict=True) if late > early}

"""One call's wall time, cut into spans that add up to it (made per call; lines run per delta).

server   read│parse│tokenize│handoff│                                │host│detokenize│format│write│
loop                                │queue│prefill        │decode    │
                                    └ the choice that ends last ─────┘

What the server's thread does for the call while the loop has it costs no wall time, and is not looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from .timeline import PHASES, REASONS, Segment, Stage

_SHOWN = {"launch": "upload", "wait": "execute"}  # what a phase of the loop is to a request
_BEFORE = ("read", "auth", "parse", "tokenize", "grammar", "other", "handoff")
_AFTER = ("host", "detokenize", "format", "write", "idle")


def _name_of(stage: Stage, part: str) -> str:
    return f"{stage}_{_SHOWN.get(part, part)}"


_OF_LOOP = {stage: {part: _name_of(stage, part) for part in (*PHASES, *REASONS)} for stage in Stage}
_QUEUE = tuple(_OF_LOOP[Stage.QUEUE][reason] for reason in REASONS)
_STEPS = tuple(_OF_LOOP[stage][phase] for stage in (Stage.PREFILL, Stage.DECODE) for phase in PHASES)
SPANS = (*_BEFORE, *_QUEUE, *_STEPS, *_AFTER)  # every name that a span can have, in the order of a call


class Piece(NamedTuple):
    """A stretch of the path: where the call was, and its seconds by span, which add up to its length."""

    name: str
    began_at: float
    ended_at: float
    spans: dict[str, float]


class Span:
    """A block of a call's work, see `CriticalPath.span`."""

    __slots__ = ("_before", "_name", "_path")

    def __init__(self, path: CriticalPath, name: str) -> None:
        self._path = path
        self._name = name

    def __enter__(self) -> None:
        self._before = self._path.enter(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._path.enter(self._before)


class _Mark(NamedTuple):
    """Where a stretch ends; it began where the one before did. `parts`: its seconds by span; None: `name` has all."""

    name: str
    at: float
    parts: dict[str, float] | None = None


class CriticalPath:
    """On the asyncio thread. Keeps the ends of stretches alone; what they add up to is found when somebody looks."""

    __slots__ = ("_marks", "_name", "_now", "began_at", "is_in_loop")

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.is_in_loop = False  # choices are being made
        self._marks: list[_Mark] = []
        self._now = now
        self._name = "other"
        self.began_at = now()

    def enter(self, name: str) -> str:
        """What the server's thread does for the call from now on; returns what it did before."""
        before = self._name
        if not self.is_in_loop and name != before:
            self._marks.append(_Mark(before, self._now()))
        self._name = name
        return before

    def span(self, name: str) -> Span:
        """What happens inside belongs to `name`, but for spans in it."""
        return Span(self, name)

    def spent(self, name: str) -> None:
        """What the server's thread did since the last cut was `name`."""
        if not self.is_in_loop:
            self._marks.append(_Mark(name, self._now()))

    def submitted(self) -> None:
        """The loop is about to be told of the call."""
        self.enter("idle")
        self.is_in_loop = True

    def taken(self, segments: Sequence[Segment], made: float, now: float) -> None:
        """The last choice has ended, and the loop was at `segments` for it: its event was made at `made`, and the
        server's thread took it up at `now`.
        """
        self.is_in_loop = False
        marks = self._marks
        marks.append(_Mark("handoff", segments[0].began_at if segments else made))
        for stage, _, ended_at, parts in segments:
            names = _OF_LOOP[stage]
            marks.append(_Mark(stage, ended_at, {names[part]: seconds for part, seconds in parts.items()}))
        marks.append(_Mark("host", now))

    def end(self, now: float | None = None) -> None:
        """The call is over, or is looked at."""
        if not self.is_in_loop:
            self._marks.append(_Mark(self._name, self._now() if now is None else now))

    def spans(self) -> dict[str, float]:
        """Seconds by name, in the order of a call, up to the last cut; they add up to `seconds`."""
        totals: dict[str, float] = {}
        since = self.began_at
        for name, at, parts in self._marks:
            if parts is not None:
                for part, seconds in parts.items():
                    totals[part] = totals.get(part, 0.0) + seconds
            elif at > since:
                totals[name] = totals.get(name, 0.0) + at - since
            since = at
        return {name: totals[name] for name in SPANS if name in totals}

    @property
    def pieces(self) -> list[Piece]:
        """They follow each other without gaps from `began_at` to the last cut."""
        pieces: list[Piece] = []
        since = self.began_at
        for name, at, parts in self._marks:
            began_at = since
            if parts is None and pieces and pieces[-1].name == name:
                began_at = pieces.pop().began_at
            if at > began_at:
                pieces.append(Piece(name, began_at, at, {name: at - began_at} if parts is None else parts))
            since = at
        return pieces

    @property
    def seconds(self) -> float:
        """From the call's beginning to the last cut of the path."""
        return self._marks[-1].at - self.began_at if self._marks else 0.0

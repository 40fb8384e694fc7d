"""One call's wall time, cut into spans that add up to it (made per call; lines run per delta).

server   read│parse│tokenize│handoff│                                │host│detokenize│format│write│
loop                                │queue│prefill        │decode    │
                                    └ the choice that ends last ─────┘

What the server's thread does for the call while the loop has it costs no wall time, and is not looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from .timeline import PHASES, REASONS, Snapshot, Stage, Timeline

_SHOWN = {"launch": "upload", "wait": "execute"}  # what a phase of the loop is to a request
_BEFORE = ("read", "auth", "parse", "tokenize", "grammar", "other", "handoff")
_AFTER = ("host", "detokenize", "format", "write", "idle")


def _name_of(stage: Stage, part: str) -> str:
    return f"{stage.value}_{_SHOWN.get(part, part)}"


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


class CriticalPath:
    """On the asyncio thread. `pieces` follow each other without gaps from `began_at` to the last cut."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.pieces: list[Piece] = []
        self.is_in_loop = False  # choices are being made
        self._now = now
        self._name = "other"
        self.began_at = self._since = now()

    def enter(self, name: str) -> str:
        """What the server's thread does for the call from now on; returns what it did before."""
        before = self._name
        if not self.is_in_loop:
            self._cut(self._now())
        self._name = name
        return before

    def span(self, name: str) -> Span:
        """What happens inside belongs to `name`, but for spans in it."""
        return Span(self, name)

    def spent(self, name: str) -> None:
        """What the server's thread did since the last cut was `name`."""
        if not self.is_in_loop:
            now = self._now()
            self._add(name, self._since, now)
            self._since = now

    def submitted(self) -> None:
        """The loop is about to be told of the call."""
        self._cut(self._now())
        self.is_in_loop = True
        self._name = "idle"

    def taken(self, timeline: Timeline, made: Snapshot, now: float) -> None:
        """The last choice has ended: its event was made at `made`, and the server's thread took it up at `now`."""
        self.is_in_loop = False
        self._since = now
        segments = timeline.cut(made)
        at = self.pieces[-1].ended_at if self.pieces else self.began_at
        self._add("handoff", at, segments[0].began_at if segments else made.at)
        for stage, began_at, ended_at, parts in segments:
            names = _OF_LOOP[stage]
            spans = {names[part]: seconds for part, seconds in parts.items()}
            self.pieces.append(Piece(stage.value, began_at, ended_at, spans))
        self._add("host", made.at, now)

    def end(self, now: float | None = None) -> None:
        """The call is over, or is looked at."""
        if not self.is_in_loop:
            self._cut(self._now() if now is None else now)

    def spans(self) -> dict[str, float]:
        """Seconds by name, in the order of a call, up to the last cut; they add up to `seconds`."""
        totals: dict[str, float] = {}
        for piece in self.pieces:
            for name, seconds in piece.spans.items():
                totals[name] = totals.get(name, 0.0) + seconds
        return {name: totals[name] for name in SPANS if name in totals}

    @property
    def seconds(self) -> float:
        """From the call's beginning to the last cut of the path."""
        return self.pieces[-1].ended_at - self.began_at if self.pieces else 0.0

    def _cut(self, now: float) -> None:
        self._add(self._name, self._since, now)
        self._since = now

    def _add(self, name: str, began_at: float, ended_at: float) -> None:
        if ended_at <= began_at:
            return
        if self.pieces and self.pieces[-1].name == name:
            began_at = self.pieces.pop().began_at
        self.pieces.append(Piece(name, began_at, ended_at, {name: ended_at - began_at}))

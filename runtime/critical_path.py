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

import numpy as np
import numpy.typing as npt

from .timeline import PHASES, REASONS, Segment, Stage

_SHOWN = {"launch": "upload", "wait": "execute"}  # what a phase of the loop is to a request
_BEFORE = ("read", "auth", "parse", "tokenize", "grammar", "other", "handoff")
_AFTER = ("host", "detokenize", "format", "write", "idle")


def _name_of(stage: Stage, part: str) -> str:
    return f"{stage}_{_SHOWN.get(part, part)}"


_COLUMNS = {stage: REASONS if stage is Stage.QUEUE else PHASES for stage in Stage}
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
    """Where a stretch ends; it began where the one before did. `segment`: what the loop did; None: `name` has all."""

    name: str
    at: float
    segment: Segment | None = None


def _parts(segment: Segment) -> dict[str, float]:
    """Its seconds by span."""
    names = _OF_LOOP[segment.stage]
    return {names[part]: seconds for part, seconds in segment.spans.items()}


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
        marks += [_Mark(segment.stage, segment.end.at, segment) for segment in segments]
        marks.append(_Mark("host", now))

    def end(self, now: float | None = None) -> None:
        """The call is over, or is looked at."""
        if not self.is_in_loop:
            self._marks.append(_Mark(self._name, self._now() if now is None else now))

    def spans(self) -> dict[str, float]:
        """Seconds by name, in the order of a call, up to the last cut; they add up to `seconds`."""
        totals: dict[str, float] = {}
        since = self.began_at
        for name, at, segment in self._marks:
            if segment is not None:
                for part, seconds in _parts(segment).items():
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
        for name, at, segment in self._marks:
            began_at = since
            if segment is None and pieces and pieces[-1].name == name:
                began_at = pieces.pop().began_at
            if at > began_at:
                spans = {name: at - began_at} if segment is None else _parts(segment)
                pieces.append(Piece(name, began_at, at, spans))
            since = at
        return pieces

    @property
    def seconds(self) -> float:
        """From the call's beginning to the last cut of the path."""
        return self._marks[-1].at - self.began_at if self._marks else 0.0


def seconds_by_span(paths: Sequence[CriticalPath]) -> dict[str, npt.NDArray[np.float64]]:
    """What `spans` says of each path, by span: of many at once it costs a third."""
    found: dict[str, list[float]] = {}
    segments: dict[Stage, list[tuple[int, Segment]]] = {stage: [] for stage in Stage}
    for number, path in enumerate(paths):
        own: dict[str, float] = {}
        since = path.began_at
        for name, at, segment in path._marks:
            if segment is not None:
                segments[segment.stage].append((number, segment))
            elif at > since:
                own[name] = own.get(name, 0.0) + at - since
            since = at
        for name, seconds in own.items():
            found.setdefault(name, []).append(seconds)
    arrays = {name: np.array(values) for name, values in found.items()}
    for stage, parts in segments.items():
        if parts:
            arrays |= _of_stage(stage, parts, len(paths))
    return arrays


def _of_stage(stage: Stage, parts: Sequence[tuple[int, Segment]], num_paths: int) -> dict[str, npt.NDArray[np.float64]]:
    """The same of the segments of one stage; a path may have several, or none."""
    starts, ends = [segment.start for _, segment in parts], [segment.end for _, segment in parts]
    if stage is Stage.QUEUE:
        seconds = np.subtract([end.reasons for end in ends], [start.reasons for start in starts])
    else:
        seconds = np.subtract([end.phases for end in ends], [start.phases for start in starts])
    totals = np.zeros((num_paths, seconds.shape[1]))
    np.add.at(totals, [number for number, _ in parts], np.maximum(seconds, 0.0))
    names = _OF_LOOP[stage]
    return {
        names[part]: values for part, column in zip(_COLUMNS[stage], totals.T, strict=True)
        if (values := column[column > 0]).size
    }  # fmt: skip

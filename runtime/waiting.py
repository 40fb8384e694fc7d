"""The waiting line: first come, first served within a priority, with bounded overtaking (runs per request and step)."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from .request import Request

MAX_OVERTAKES = 64  # times that lighter requests may start before one that waits for blocks
MAX_LOOK_AHEAD = 64  # waiters that one plan tries


@dataclass(slots=True, order=True)
class Waiter:
    """A request's place: lower priority number first, then lower turn."""

    priority: int
    turn: int
    request: Request = field(compare=False)
    num_overtaken: int = field(default=0, compare=False)


class WaitingLine:
    """Requests that hold no blocks, in the order in which they should start."""

    def __init__(self) -> None:
        self._line: list[Waiter] = []
        self._waiters: dict[int, Waiter] = {}
        self._turns = itertools.count(1)

    def __len__(self) -> int:
        return len(self._line)

    def add(self, request: Request) -> None:
        """Behind all others of its priority."""
        self._insert(Waiter(request.priority, next(self._turns), request))

    def add_front(self, request: Request) -> None:
        """Before all others of its priority: for a request that had started already."""
        self._insert(Waiter(request.priority, -next(self._turns), request))

    def ahead(self) -> list[Waiter]:
        """The first waiters; a snapshot, so they can leave the line meanwhile."""
        return self._line[:MAX_LOOK_AHEAD]

    def leave(self, request_id: int) -> None:
        """Take a request out, wherever it stands."""
        waiter = self._waiters.pop(request_id)
        del self._line[bisect_left(self._line, waiter)]

    def _insert(self, waiter: Waiter) -> None:
        insort(self._line, waiter)
        self._waiters[waiter.request.id] = waiter


def may_overtake(blocked: list[Waiter]) -> bool:
    """Whether one more request may start before all of `blocked`."""
    return all(waiter.num_overtaken < MAX_OVERTAKES for waiter in blocked)

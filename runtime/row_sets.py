"""The rows of a step as columns, and what stays while the same requests run (found per step, made when they change)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ostinato.plugins.sampling_rows import I32

from .plan import PlanRow
from .request import Request, Status
from .steady import SteadyRows

Index = NDArray[np.intp]  # of an array: NumPy takes no other type as fast


class Seat(NamedTuple):
    """What a running request has to itself: a number from 0. `arrival` counts seatings, from 1."""

    number: int
    arrival: int
    num_preemptions: int


@dataclass(frozen=True, slots=True, eq=False)
class RowSet:
    """Requests in a step's order. The same set is the same object: who keeps things for a set compares by `is`."""

    requests: tuple[Request, ...]
    num_preemptions: list[int]
    seats: Index  # [B]
    arrivals: Index  # [B]
    num_prompts: I32  # [B]


@dataclass(frozen=True, slots=True)
class StepRows:
    """A plan's rows, one column a field of PlanRow. `steady`: they are step number `step` of such rows."""

    row_set: RowSet
    starts: I32  # [B]
    ends: I32  # [B]
    num_sampled: tuple[int, ...]
    fed_from: I32 | None  # [B]; None where no token comes from the step before
    steady: SteadyRows | None = None
    step: int = 0

    @property
    def requests(self) -> tuple[Request, ...]:
        return self.row_set.requests


class RowSets:
    """The sets that ran last, as many as steps are in flight: with several stages, sets take turns.

    A seat is free again when its request is finished or was preempted since. Nobody tells: it is looked up when the
    rows change. No more requests run than a step has rows, so there is a seat for each. It may change hands while a
    step in flight still has a row of its last request, which was stopped or aborted meanwhile: batches keep arrays of
    their own, and what is kept on a device for a seat is written on the stream of the steps, after that one.
    """

    def __init__(self, max_rows: int, num_kept: int) -> None:
        self._seats: dict[Request, Seat] = {}
        self._free = list(range(max_rows))[::-1]
        self._num_arrivals = 0
        self._kept: deque[RowSet] = deque(maxlen=num_kept)

    def columns(self, rows: Sequence[PlanRow]) -> StepRows:
        """The rows' columns, with the set that they are."""
        requests, starts, ends, num_sampled, fed_from = zip(*rows, strict=True) if rows else ((),) * 5
        row_set = self._find(requests)
        return StepRows(
            row_set=row_set,
            starts=np.array(starts, np.int32),
            ends=np.array(ends, np.int32),
            num_sampled=num_sampled,
            fed_from=np.array(fed_from, np.int32) if max(fed_from, default=-1) >= 0 else None,
        )

    def _find(self, requests: tuple[Request, ...]) -> RowSet:
        num_preemptions = [request.num_preemptions for request in requests]
        for kept in self._kept:
            if kept.requests == requests and kept.num_preemptions == num_preemptions:
                return kept
        self._sweep()
        seats = [self._seat(request) for request in requests]
        row_set = RowSet(
            requests=requests,
            num_preemptions=num_preemptions,
            seats=np.array([seat.number for seat in seats], np.intp),
            arrivals=np.array([seat.arrival for seat in seats], np.intp),
            num_prompts=np.array([request.num_prompt for request in requests], np.int32),
        )
        self._kept.append(row_set)
        return row_set

    def _sweep(self) -> None:
        """Take the seats of those who left."""
        for request, seat in list(self._seats.items()):
            if request.status is Status.FINISHED or request.num_preemptions != seat.num_preemptions:
                del self._seats[request]
                self._free.append(seat.number)

    def _seat(self, request: Request) -> Seat:
        seat = self._seats.get(request)
        if seat is None:
            assert self._free, f"more than {len(self._seats)} requests run"
            self._num_arrivals += 1
            seat = self._seats[request] = Seat(self._free.pop(), self._num_arrivals, request.num_preemptions)
        return seat

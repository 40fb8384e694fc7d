"""Rows that go on step after step, a token each, while nothing else happens: planned and committed as one (per step).

step      0       1       2       3        0 is the plan that the rows were found in, on its way
row 0   17─18   18─19   19─20   20─21      a row's start is its first + step
row 1   30─31   31─32   32─33   33─34      31─32 fills a block of 16 when it lands; 32─33 needs a new one

What rows have in common is kept here; requests are told when the rows part, or when somebody looks (`settle`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat

from .outcome import NO_TOKEN
from .plan import Plan, PlanRow, goes_on, new_tuple
from .request import Event, Request

_REST = tuple(repeat(value) for value in Event(0, 0, None, None)[2:])  # of the event of a token like any other


class SteadyRows:
    """Rows that decode and are plain: a token of theirs is an event and nothing more, unless it is a stop id.

    Where steps are fed and two are in flight at most. `num_steps`: the last step that all rows can be in; there the
    first of them reaches its max_tokens.
    """

    def __init__(self, first: Plan, block_size: int) -> None:
        rows = first.rows
        self.requests = tuple([row.request for row in rows])
        self.num_rows = len(rows)
        self.num_steps = min(request.num_prompt + request.max_tokens - 1 - end for request, _, end, _, _ in rows)
        self._newest = 0
        self._block_size = block_size
        self._starts = [row.start for row in rows]
        self._by_phase: list[list[int]] = [[] for _ in range(block_size)]  # rows, by when they come to a new block
        for row, start in enumerate(self._starts):
            self._by_phase[-start % block_size].append(row)
        self._special = frozenset([NO_TOKEN]).union(*(request.stop_ids for request in self.requests))
        self._ids = [request.id for request in self.requests]
        self._tokens = [request.tokens for request in self.requests]
        first.steady, first.step = self, 0

    @property
    def next_step(self) -> int:
        return self._newest + 1

    def next_plan(self) -> Plan:
        self._newest += 1
        return Plan.of_steady(self, self._newest)

    def rows(self, step: int) -> tuple[PlanRow, ...]:
        """A step's rows, one by one."""
        return tuple(
            PlanRow(request, start + step, start + step + 1, 1, line)
            for line, (request, start) in enumerate(zip(self.requests, self._starts, strict=True))
        )

    def entering(self, step: int) -> list[int]:
        """The rows whose token in that step is the first of a block."""
        return self._by_phase[step % self._block_size]

    def start(self, row: int, step: int) -> int:
        return self._starts[row] + step

    def are_plain(self, step: int, tokens: Sequence[int]) -> bool:
        """Whether what a step sampled ends no row."""
        return step < self.num_steps and self._special.isdisjoint(tokens)

    def take(self, tokens: Sequence[int]) -> list[Event]:
        """A plain token for each row; nothing here runs in Python once a row."""
        deque(map(list.append, self._tokens, tokens), maxlen=0)
        return list(map(new_tuple, repeat(Event), zip(self._ids, tokens, *_REST, strict=False)))

    def settle(self, num_in_flight: int) -> None:
        """Tell the requests where they are, with so many steps of theirs in flight."""
        for line, request in enumerate(self.requests):
            end = len(request.tokens) - 1 + num_in_flight
            request.num_computed, request.num_planned, request.num_in_flight = end - num_in_flight, end, num_in_flight
            request.pending_line = line if num_in_flight and goes_on(request, end) else -1


def steady_rows(plan: Plan, running: Sequence[Request], block_size: int) -> SteadyRows | None:
    """The rows of a step in flight, if the next one will have them all again, in this order, and no others."""
    if not plan.num_rows == plan.num_tokens == plan.num_sampled == len(running):
        return None
    for row, request in zip(plan.rows, running, strict=True):
        if row.request is not request or request.pending_line < 0 or not _is_plain(request):
            return None
    return SteadyRows(plan, block_size)


def _is_plain(request: Request) -> bool:
    """Whether its tokens are handed on as they come; the first one after each start is not."""
    params = request.params
    return (
        request.guide is None
        and params.logprobs is None
        and not request.is_catching_up
        and request.num_output >= params.min_tokens
    )

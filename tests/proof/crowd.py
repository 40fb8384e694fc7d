"""Requests of all kinds that join, leave and are stopped at random, and what each came to (made per test)."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

from ostinato.engines.sizes import Limits
from ostinato.runtime.executor import Executor
from ostinato.runtime.request import Event, SamplingParams, TokenLogprob
from tests.overlap_requests import VOCAB, Band, Order, make, random_orders

STOPS = frozenset(range(0, VOCAB, 13))  # what a stop string's last token would be, for every fifth request
_ABORTED_SHARE = 0.03  # of steps


class Crowd:
    """Joins for about `num_steps` steps, in waves of any height. The same seed makes the same requests."""

    def __init__(self, limits: Limits, executor: Executor, seed: int, num_steps: int) -> None:
        self.band = Band(limits, executor)
        self.orders: list[Order] = []
        self.aborted: set[int] = set()
        self.num_steps = 0
        self._limits, self._most = limits, num_steps
        self._kinds, self._moments = random.Random(seed), random.Random(seed + 1)
        self._coming: list[Order] = []
        self.band.on_event = partial(_stop, self.band)

    def run(self) -> None:
        """Until nobody is left."""
        level = 0
        while self.num_steps < self._most:
            if self.num_steps % 16 == 0:
                level = self._moments.choice(range(1, 2 * self._limits.max_rows))
            while self.num_present < level:
                self._join()
            if self._moments.random() < _ABORTED_SHARE:
                self._abort(self._moments.choice(list(self.band.events)[-level:]))
            self.step()
            if self.num_steps % 50 == 0:
                self.band.pages.check_integrity()
        self._leave()
        self._come(_stairs(self._limits))
        self._leave()

    def _leave(self) -> None:
        while self.num_present:
            self.step()

    @property
    def num_present(self) -> int:
        scheduler = self.band.scheduler
        return scheduler.num_running + scheduler.num_waiting + self.band.loop._inbox.qsize()

    def step(self) -> None:
        self.num_steps += 1
        self.band.step()

    def _join(self) -> None:
        if not self._coming:
            self._coming = random_orders(self._kinds, 20)
        self._come([self._coming.pop()])

    def _come(self, orders: list[Order]) -> None:
        for order in orders:
            self.band.submit(make(len(self.orders), order, self._limits))
            self.orders.append(order)

    def _abort(self, number: int) -> None:
        self.aborted.add(number)
        self.band.loop.abort(number)

    def seen(self) -> Counter[str]:
        """How many requests were of each kind, or ended in each way."""
        seen = Counter(str(self.band.finish(number)) for number in range(len(self.orders)))
        for _, params, choice, is_guided in self.orders:
            seen["guided"] += is_guided
            seen["chosen again"] += choice > 0
            seen["scored"] += params.prompt_logprobs is not None
            seen["penalized"] += params.has_penalties
            seen["biased"] += bool(params.logit_bias)
            seen["min_tokens"] += params.min_tokens > 0
            seen["logprobs"] += params.logprobs is not None
        seen["preempted"] = self.band.scheduler.num_preemptions
        seen["hits"] = self.band.scheduler.num_prefix_hits
        return seen


def plain(limits: Limits, executor: Executor, crowd: Crowd) -> Band:
    """The same requests, all there from the start."""
    band = Band(limits, executor)
    band.on_event = partial(_stop, band)
    for number, order in enumerate(crowd.orders):
        band.submit(make(number, order, limits))
    band.run()
    return band


def check_same(crowd: Crowd, other: Band, tolerance: float) -> None:
    """Every request ended as in the other band; logprobs to `tolerance`. One that was aborted has its first tokens."""
    for number in range(len(crowd.orders)):
        found, wanted = crowd.band.outcome(number), other.outcome(number)
        if number in crowd.aborted and found[-1].finish == "abort":
            assert found[-1].token_id is None
            found = found[:-1]
            wanted = wanted[: len(found)]
        assert [_plain(event) for event in found] == [_plain(event) for event in wanted], number
        for one, two in zip(found, wanted, strict=True):
            assert _logprobs(one) == pytest.approx(_logprobs(two), abs=tolerance)


def _stairs(limits: Limits) -> list[Order]:
    """Requests that start together and end one after another."""
    lengths = range(3, 3 + limits.max_rows)
    says_two = ((2, 100.0),)  # which stops nobody
    return [([1], SamplingParams(max_tokens=length, logit_bias=says_two), 0, False) for length in lengths]


def _stop(band: Band, event: Event) -> None:
    """As the door does, which finds stop strings: one step later."""
    if event.request_id % 5 == 0 and event.token_id in STOPS and event.finish is None:
        band.loop.abort(event.request_id)


def _plain(event: Event) -> tuple[int | None, str | None, str | None]:
    return event.token_id, event.finish, None if event.error is None else event.error.code


def _logprobs(event: Event) -> list[float]:
    """Of its token, of its prompt's, and of the best ones."""
    told: list[TokenLogprob | None] = [event.logprob, *(event.prompt_logprobs or ())]
    return [value for one in told if one is not None for value in (one.logprob, *(value for _, value in one.top))]

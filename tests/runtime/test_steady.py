"""Steady rows: a step that is planned, packed and committed for all rows at once equals the one made row by row."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from ostinato.engines.errors import RequestError
from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import I32, Sampled
from ostinato.runtime.batch import Batch, Packer
from ostinato.runtime.device_rows import DeviceRows
from ostinato.runtime.outcome import NO_TOKEN
from ostinato.runtime.pages import Pages
from ostinato.runtime.plan import Plan
from ostinato.runtime.request import Event, Request, SamplingParams
from ostinato.runtime.scheduler import Scheduler
from tests.fakes import make_limits, make_request
from tests.guides import Endless
from tests.overlap_fakes import overlap_rules
from tests.scale import scaled
from tests.scheduling import Turns

VOCAB = 64
STOPS = (60, 61)
NUM_STEPS = scaled(1200, 20_000)
PROGRESS = ("status", "tokens", "blocks", "num_computed", "num_planned", "num_in_flight", "pending_line", "num_cached")


class AnyToken(Endless):
    """A guide that allows all and counts what it took."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def fill_mask(self, words: I32) -> None:
        words[:] = -1

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


class Side:
    """A desk over no executor, with or without the short way for steady rows."""

    def __init__(self, limits: Limits, *, is_steady: bool) -> None:
        rules = overlap_rules(limits)
        self.pages = Pages(limits)
        self.scheduler = Scheduler(limits, self.pages, rules)
        self.packer = Packer(limits, VOCAB, rules)
        self.requests: dict[int, Request] = {}
        self.flights: deque[Plan] = deque()
        if not is_steady:
            self.scheduler._in_flight.launch_steady = lambda running: None  # type: ignore[method-assign]

    def submit(
        self, number: int, prompt: list[int], params: SamplingParams, rng: random.Random, limits: Limits
    ) -> None:
        request = self.requests[number] = make_request(number, prompt, params, limits, eos=(62,))
        request.priority = rng.randrange(2)
        request.guide = AnyToken() if rng.random() < 0.04 else None
        request.timeline = Turns()  # type: ignore[assignment]
        self.scheduler.submit(request)

    def plan(self) -> tuple[Plan, Batch] | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self.flights.append(plan)
        return plan, self.packer.pack(plan)

    def land(self, seed: int, *, fails: bool) -> list[tuple[Any, ...]]:
        """Events, in a form that compares."""
        plan = self.flights.popleft()
        events = self.scheduler.fail(plan, RequestError("no")) if fails else self.scheduler.commit(plan, _sampled(plan))
        if self.flights and any(row.request.guide for row in self.flights[0].rows) and seed % 2:
            self.packer.late_masks(self.flights[0])
        return [_comparable(event) for event in events]

    def progress(self) -> list[tuple[Any, ...]]:
        self.scheduler.settle()
        return [
            (number, *(getattr(request, name) for name in PROGRESS), request.timeline.stages)  # type: ignore[union-attr]
            for number, request in self.requests.items()
        ]


def _sampled(plan: Plan) -> Sampled:
    """A scripted token a line: now and then one that ends a request, or none at all."""
    tokens, tops = [], []
    for request, _, end, num_sampled, _ in plan.rows:
        for position in range(end - num_sampled, end):
            if position + 1 < request.num_prompt:
                tokens.append(request.tokens[position + 1])
            else:
                number = (request.id * 7919 + position * 104729) % 1009
                tokens.append(NO_TOKEN if number == 0 else STOPS[0] if number < 6 else number % 50)
            tops.append([position % 50, 3])
    count = len(tokens)
    ids = np.array(tops, np.int32).reshape(count, 2)
    return Sampled(np.array(tokens, np.int32), np.zeros(count, np.float32), ids, ids.astype(np.float32))


def _comparable(event: Event) -> tuple[Any, ...]:
    assert type(event) is Event
    return (*event[:4], None if event.error is None else str(event.error), *event[5:])


def _rows(plan: Plan) -> list[tuple[int, ...]]:
    return [(row.request.id, *row[1:]) for row in plan.rows]


def _check_equal(one: Batch, other: Batch) -> None:
    assert isinstance(one.sampling, DeviceRows)
    assert isinstance(other.sampling, DeviceRows)
    for mine, others in ((one, other), (one.sampling, other.sampling)):
        for field in fields(mine):
            value, wanted = getattr(mine, field.name), getattr(others, field.name)
            if isinstance(wanted, np.ndarray):
                assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape), field.name
                assert value.tobytes() == wanted.tobytes(), field.name
    assert [line.line for line in one.sampling.joined] == [line.line for line in other.sampling.joined]
    assert (one.feed_rows is None) == (other.feed_rows is None)
    assert one.sampling.num_late_masks == other.sampling.num_late_masks


def _params(rng: random.Random) -> SamplingParams:
    kind = rng.choice(["plain", "plain", "plain", "plain", "seeded", "min_tokens", "penalties", "rare"])
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"temperature": 0.0},
        "seeded": {"temperature": 0.7, "top_p": 0.9},
        "min_tokens": {"min_tokens": rng.randint(1, 9)},
        "penalties": {"presence_penalty": 1.0},
        "rare": rng.choice([{"logprobs": 1}, {"prompt_logprobs": 0}, {"stop_token_ids": tuple(range(6))}]),
    }
    usual: dict[str, Any] = {"stop_token_ids": STOPS, "max_tokens": rng.choice([9, 30, 70])}
    return SamplingParams(**usual | kinds[kind])


@pytest.mark.parametrize("seed", range(6))
def test_the_short_way_is_the_long_way(seed: int) -> None:
    rng = random.Random(seed)
    max_rows = rng.choice([2, 4, 7])
    limits = make_limits(
        block_size=(1, 4, 16)[seed % 3], max_rows=max_rows, max_step_tokens=24, max_context=96,
        num_blocks=(max_rows * 96 // (1, 4, 16)[seed % 3]) * rng.choice([2, 3]) // 4 + 96,
    )  # fmt: skip
    short, long = Side(limits, is_steady=True), Side(limits, is_steady=False)
    seen: Counter[str] = Counter()
    number = 0
    while seen["steps"] < NUM_STEPS:
        if rng.random() < 0.05 or not short.scheduler.num_running:
            for _ in range(rng.randint(1, max_rows)):
                number += 1
                prompt, params, dice = rng.choices(range(3), k=rng.randint(1, 20)), _params(rng), rng.randrange(2**32)
                for side in (short, long):
                    side.submit(number, prompt, params, random.Random(dice), limits)
        while len(short.flights) < 2:
            mine, other = short.plan(), long.plan()
            assert (mine is None) == (other is None)
            if mine is None or other is None:
                break
            assert _rows(mine[0]) == _rows(other[0])
            assert (mine[0].num_rows, mine[0].num_tokens) == (other[0].num_rows, other[0].num_tokens)
            assert mine[0].num_sampled == other[0].num_sampled
            _check_equal(mine[1], other[1])
            seen["steps"] += 1
            seen["steady"] += mine[0].steady is not None
            if rng.random() < 0.1:
                break  # only one in flight
        if rng.random() < 0.01 and short.requests:
            victim = rng.choice(list(short.requests))
            short.scheduler.abort(victim)
            long.scheduler.abort(victim)
        if short.flights:
            dice, fails = rng.randrange(100), rng.random() < 0.003
            assert short.land(dice, fails=fails) == long.land(dice, fails=fails)
        if rng.random() < 0.02:
            assert short.progress() == long.progress()
            short.pages.check_integrity()
        _forget_ended(short, long)
    assert short.progress() == long.progress()
    assert long.scheduler.num_preemptions == short.scheduler.num_preemptions
    assert short.pages.num_free == long.pages.num_free
    assert seen["steady"] > seen["steps"] // 20, seen


def _forget_ended(*sides: Side) -> None:
    for side in sides:
        side.requests = {n: request for n, request in side.requests.items() if n in side.scheduler._requests}


# What ends it


def _sampled_arrays(count: int) -> tuple[Any, ...]:
    return np.zeros(count, np.float32), np.zeros((count, 0), np.int32), np.zeros((count, 0), np.float32)


def test_a_token_that_ends_one_row_ends_no_other() -> None:
    limits = make_limits(block_size=4, max_rows=3, max_step_tokens=32, max_context=96, num_blocks=72)
    side = Side(limits, is_steady=True)
    for number, stops in enumerate([(9,), (8,), ()]):
        params = SamplingParams(max_tokens=40, stop_token_ids=stops)
        side.scheduler.submit(make_request(number, [number + 1] * 5, params, limits))

    def step(*tokens: int) -> list[tuple[int, int | None, str | None]]:
        while len(side.flights) < 2:
            assert side.plan() is not None
        plan = side.flights.popleft()
        events = side.scheduler.commit(plan, Sampled(np.array(tokens, np.int32), *_sampled_arrays(len(tokens))))
        return [(event.request_id, event.token_id, event.finish) for event in events]

    for token in (7, 6, 5, 4):
        assert step(token, token, token) == [(number, token, None) for number in range(3)]
    assert side.flights[0].steady is not None
    assert step(8, 9, 9) == [(0, 8, None), (1, 9, None), (2, 9, None)], "stop ids of others"
    assert step(7, 8, 9) == [(0, 7, None), (1, 8, "stop"), (2, 9, None)]
    assert step(9, 5, 5) == [(0, 9, "stop"), (2, 5, None)], "what was launched before is surplus"
    assert step(1, NO_TOKEN) == [(2, None, "error")]

"""A million random operations on pages and scheduler: the books always agree, and nothing is left when idle."""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np
import pytest

from ostinato.engines.errors import RequestError
from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import Sampled
from ostinato.runtime.pages import Pages
from ostinato.runtime.plan import Plan
from ostinato.runtime.request import Request, SamplingParams, Status
from ostinato.runtime.scheduler import Scheduler
from tests.fakes import bucket_rules, make_limits, make_request
from tests.overlap_fakes import overlap_rules

NUM_OPERATIONS = 1_000_000
SEEDS = range(8)
STEPS_BETWEEN_CHECKS = 50
VOCAB = 1000
STOP = 999
PREFIXES = [[number] * 60 for number in range(4)]


def _token(request: Request, num_output: int) -> int:
    return (request.id * 7919 + num_output * 104729) % VOCAB


def _sample(plan: Plan) -> Sampled:
    """Each request's scripted token; in lines that score a prompt, the prompt's own."""
    tokens = []
    for request, _, end, num_sampled, _ in plan.rows:
        for position in range(end - num_sampled, end):
            is_forced = position + 1 < request.num_prompt
            tokens.append(
                request.tokens[position + 1] if is_forced else _token(request, position + 1 - request.num_prompt)
            )
    count = len(tokens)
    return Sampled(
        np.array(tokens, np.int32),
        np.zeros(count, np.float32),
        np.empty((count, 0), np.int32),
        np.empty((count, 0), np.float32),
    )


class Storm:
    """Random requests on one desk, and a count of what happened to them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        max_rows = self.rng.choice([3, 12, 20])
        self.limits: Limits = make_limits(
            block_size=self.rng.choice([1, 4, 8]),
            max_rows=max_rows,
            max_step_tokens=64,
            max_context=120,
            num_blocks=160,
        )
        self.pages = Pages(self.limits)
        self.rules = bucket_rules(self.limits) if seed % 2 else overlap_rules(self.limits)
        self.scheduler = Scheduler(self.limits, self.pages, self.rules)
        self.flights: deque[Plan] = deque()
        self.live: dict[int, Request] = {}
        self.counts: Counter[str] = Counter()
        self.num_requests = 0

    @property
    def num_operations(self) -> int:
        hits = self.scheduler.num_prefix_hits // self.limits.block_size
        return self.counts.total() + self.scheduler.num_preemptions + self.pages.num_evictions + hits

    def submit(self) -> None:
        rng = self.rng
        prompt = rng.choice(PREFIXES)[: rng.randrange(60)] + rng.choices(range(5), k=rng.randint(1, 20))
        params = SamplingParams(
            max_tokens=rng.randint(0, 30),
            stop_token_ids=(STOP, 17, 170),
            prompt_logprobs=0 if rng.random() < 0.05 else None,
        )
        self.num_requests += 1
        request = make_request(self.num_requests, prompt, params, self.limits)
        request.priority = rng.randrange(3)
        request.salt = rng.choice(["", "", "other"])
        self.counts["add"] += 1
        if self.scheduler.submit(request) is None:
            self.live[request.id] = request
        else:
            self.counts["finish"] += 1

    def disturb(self) -> None:
        """Abort or preempt one request, now and then."""
        if self.live and self.rng.random() < 0.1:
            request_id = self.rng.choice(list(self.live))
            event = self.scheduler.abort(request_id)
            assert event is not None
            assert event.finish == "abort"
            del self.live[request_id]
            self.counts["abort"] += 1

    def preempt(self) -> None:
        """Now and then, once all that flies has landed."""
        if self.rng.random() < 0.05:
            while self.flights:
                self.land(self.flights.popleft())
            running = [request for request in self.live.values() if request.status is Status.RUNNING]
            if running:
                self.scheduler.preempt(self.rng.choice(running))

    def step(self) -> None:
        """Launch while there is room, sometimes less; land the oldest."""
        while len(self.flights) < self.rules.num_in_flight:
            plan = self.scheduler.plan()
            if plan is None:
                break
            for row in plan.rows:
                self.counts["step" if row.num_tokens == 1 else "chunk"] += 1
            self.flights.append(plan)
            if self.rng.random() < 0.1:
                break
        self.disturb()  # also while steps run
        if self.flights:
            self.land(self.flights.popleft())

    def land(self, plan: Plan) -> None:
        if self.rng.random() < 0.002:
            for event in self.scheduler.fail(plan, RequestError("no")):
                del self.live[event.request_id]
                self.counts["fail"] += 1
            return
        for event in self.scheduler.commit(plan, _sample(plan)):
            if event.finish is not None:
                self.finish(self.live.pop(event.request_id), event.finish)

    def finish(self, request: Request, reason: str) -> None:
        self.counts["finish"] += 1
        output = request.tokens[request.num_prompt :]
        assert output == [_token(request, index) for index in range(len(output))]
        assert reason == ("stop" if set(output) & request.stop_ids else "length")
        assert bool(request.blocks) == bool(request.num_in_flight)

    def check(self) -> None:
        self.pages.check_integrity()
        self.scheduler.settle()
        for request in self.live.values():
            assert request.num_in_flight == sum(row.request is request for plan in self.flights for row in plan.rows)
            assert request.num_in_flight or request.num_planned == request.num_computed

    def drain(self) -> None:
        while not self.scheduler.is_idle:
            self.step()
        assert not self.live
        assert self.pages.num_free == self.pages.num_total
        self.pages.check_integrity()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_books_agree_through_random_operations(seed: int) -> None:
    storm = Storm(seed)
    num_steps = 0
    while storm.num_operations < NUM_OPERATIONS // len(SEEDS):
        for _ in range(storm.rng.choice([0, 0, 1, 1, 3])):
            storm.submit()
        storm.preempt()
        storm.disturb()
        storm.step()
        num_steps += 1
        if num_steps % STEPS_BETWEEN_CHECKS == 0:
            storm.check()
        if num_steps % 4000 == 0 or len(storm.live) > 200:
            storm.drain()
    storm.drain()
    assert min(storm.counts[name] for name in ("add", "chunk", "step", "finish", "abort")) > 500
    assert storm.scheduler.num_preemptions > 100
    assert storm.scheduler.num_prefix_hits > 1000
    assert storm.pages.num_evictions > 100

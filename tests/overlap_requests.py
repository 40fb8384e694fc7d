"""Random requests of all kinds, and a loop over them that keeps each one's events (made per test)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from ostinato.engines.sizes import Limits
from ostinato.runtime.batch import Packer
from ostinato.runtime.executor import Executor
from ostinato.runtime.loop import Loop
from ostinato.runtime.pages import Pages
from ostinato.runtime.request import Event, Request, SamplingParams
from ostinato.runtime.scheduler import Scheduler
from tests.fakes import make_request
from tests.overlap_fakes import HashGuide

VOCAB = 64
MAX_OUTPUT = 24
PREFIXES = [[number] * 20 for number in range(3)]

Order = tuple[list[int], SamplingParams, int, bool]  # prompt, parameters, choice, whether it is guided


def random_params(rng: random.Random) -> SamplingParams:
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": rng.choice([0, 5]), "top_p": rng.choice([1.0, 0.8])},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": ((rng.randrange(VOCAB), 3.0), (rng.randrange(VOCAB), -5.0))},
        {"min_tokens": rng.randint(0, 6)},
        {"logprobs": rng.choice([0, 3]), "prompt_logprobs": rng.choice([None, 0, 2])},
    ]
    others = rng.choice(choices)
    return SamplingParams(
        seed=rng.randrange(1000),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 3, 12]))),
        max_tokens=rng.randint(max(1, others.get("min_tokens", 0)), MAX_OUTPUT),
        **others,
    )


def random_orders(rng: random.Random, count: int) -> list[Order]:
    """Some have prefixes in common, some are choices of one call, some only score their prompt."""
    orders: list[Order] = []
    while len(orders) < count:
        prompt = rng.choice(PREFIXES)[: rng.randrange(21)] + rng.choices(range(VOCAB), k=rng.randint(1, 12))
        params = random_params(rng)
        if rng.random() < 0.05:
            params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        is_guided = rng.random() < 0.25 and params.max_tokens != 0 and not params.min_tokens
        orders += [(prompt, params, choice, is_guided) for choice in range(rng.choice([1, 1, 1, 3]))]
    return orders[:count]


def make(number: int, order: Order, limits: Limits) -> Request:
    prompt, params, choice, is_guided = order
    request = make_request(number, prompt, params, limits, choice=choice)
    request.guide = HashGuide(VOCAB) if is_guided else None
    request.priority = number % 7 == 3
    return request


class Band:
    """A loop over an executor, stepped by a test; keeps every event of every request."""

    def __init__(
        self, limits: Limits, executor: Executor, *, prefix_caching: bool = True, vocab_size: int = VOCAB
    ) -> None:
        self.pages = Pages(limits, prefix_caching)
        self.scheduler = Scheduler(limits, self.pages, executor.rules)
        self.loop = Loop(self.scheduler, Packer(limits, vocab_size, executor.rules), executor)
        self.events: dict[int, list[Event]] = {}
        self.on_event: Callable[[Event], None] = lambda event: None

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.events[request.id] = []
            self.loop.submit(request)

    def step(self) -> list[Event]:
        events = self.loop.step()
        for event in events:
            earlier = self.events[event.request_id]
            assert not earlier or earlier[-1].finish is None, "an event came after the last"
            earlier.append(event)
            self.on_event(event)
        return events

    def run(self) -> None:
        """Until idle; then every block is free."""
        while not self.scheduler.is_idle or not self.loop._inbox.empty():
            self.step()
        self.check_idle()

    def check_idle(self) -> None:
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.pages.num_free == self.pages.num_total
        self.pages.check_integrity()

    def token_ids(self, number: int) -> list[int]:
        return [event.token_id for event in self.events[number] if event.token_id is not None]

    def finish(self, number: int) -> str | None:
        return self.events[number][-1].finish if self.events[number] else None

    def outcome(self, number: int) -> list[Event]:
        """Its events, but for what its neighbours decide."""
        return [event._replace(num_cached=0) for event in self.events[number]]


def ids_of(events: Sequence[Event]) -> list[int | None]:
    return [event.token_id for event in events]

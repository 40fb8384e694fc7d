"""What the scheduler's tests share: short prompts, scripted logits, and a request's events when it runs alone."""

from __future__ import annotations

import random

from ostinato.engines.sizes import Limits
from ostinato.runtime.plan import Plan
from ostinato.runtime.request import Event, Request, SamplingParams
from ostinato.runtime.timeline import LoopClock, Stage
from tests.fakes import Desk, make_request

VOCAB = 96


class Turns:
    """A timeline that keeps the stages alone."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.stages: list[Stage] = []

    def turn(self, stage: Stage) -> None:
        self.stages.append(stage)


def greedy(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def best(token_id: int) -> list[float]:
    """Logits of which one token is the best."""
    return [float(token == token_id) for token in range(VOCAB)]


def rows_of(plan: Plan | None) -> list[tuple[int, int, int]]:
    """(request, tokens, sampled) of each row."""
    return [] if plan is None else [(row.request.id, row.num_tokens, row.num_sampled) for row in plan.rows]


def alone(request: Request, limits: Limits) -> list[Event]:
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(request.id, request.tokens[: request.num_prompt], request.params, limits))
    desk.run()
    return desk.events[request.id]

"""A request gives the same tokens and logprobs whatever runs beside it, whenever, and in whichever blocks."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest

from ostinato.engines.sizes import Limits
from ostinato.runtime.pages import Pages
from ostinato.runtime.request import Event, Request, SamplingParams
from tests.fakes import Desk, make_limits, make_request

VOCAB = 96
EOS = (95,)
NUM_REQUESTS = 200
SMALL_POOL = 48  # blocks of 2 tokens, which is what the longest request takes
Answer = list[tuple[object, ...]]


def _params(rng: random.Random) -> SamplingParams:
    is_greedy = rng.random() < 0.3
    max_tokens = rng.randint(12, 30)
    return SamplingParams(
        temperature=0.0 if is_greedy else rng.choice([0.5, 0.9, 1.5]),
        top_k=rng.choice([0, 0, 5, 40, 10**12]),
        top_p=rng.choice([1.0, 0.9, 0.5]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.4]),
        logit_bias=rng.choice([(), ((3, 2.5), (11, -100.0)), ((40, 1.0),)]),
        stop_token_ids=rng.choice([(), (7,), (20, 21, 22)]),
        min_tokens=rng.choice([6, 9, 12]),  # so that each lives long enough to be preempted
        max_tokens=max_tokens,
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 2]),
    )


def make_requests(limits: Limits) -> list[Request]:
    """The same 200 requests every time: a third share one of four long prefixes."""
    rng = random.Random(11)
    prefixes = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(4)]
    requests = []
    for number in range(NUM_REQUESTS):
        shared = rng.choice(prefixes)[: rng.randint(8, 40)] if rng.random() < 0.35 else []
        prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 18))]
        requests.append(make_request(number, prompt, _params(rng), limits, eos=EOS, choice=rng.randrange(3)))
    return requests


def _limits(max_rows: int) -> Limits:
    return make_limits(
        block_size=8, max_rows=max_rows, max_step_tokens=max(max_rows, 24), max_context=96, num_blocks=600
    )


def _answer(events: Sequence[Event]) -> Answer:
    """All that a client can see, but for `num_cached`, which tells how it was made."""
    return [(e.token_id, e.logprob, e.finish, e.prompt_logprobs, e.error) for e in events]


@functools.cache
def answers_alone() -> list[Answer]:
    """Each request alone on an empty desk, without prefix sharing."""
    limits = _limits(1)
    desk = Desk(limits, VOCAB, pages=Pages(limits, prefix_caching=False))
    for request in make_requests(limits):
        desk.submit(request)
        desk.run()
    return [_answer(desk.events[number]) for number in range(NUM_REQUESTS)]


def _run_together(desk: Desk, order: Sequence[Request], rng: random.Random) -> set[int]:
    """All requests, arriving over time; every eighth is copied by one that is aborted somewhere."""
    pending = list(order)
    doomed: dict[int, int] = {}  # id → steps to live
    while pending or not desk.scheduler.is_idle:
        for _ in range(min(len(pending), rng.choice([0, 0, 1, 2, 5]))):
            request = pending.pop()
            desk.submit(request)
            if request.id % 8 == 0:
                copy = make_request(1000 + request.id, request.tokens, request.params, _limits(1), eos=EOS)
                desk.submit(copy)
                doomed[copy.id] = rng.randint(0, 20)
        for number in [number for number, left in doomed.items() if left == 0]:
            desk.abort(number)
            del doomed[number]
        doomed = {number: left - 1 for number, left in doomed.items()}
        desk.step()
    desk.check_idle()
    return {request.id for request in order if request.num_preemptions}


def _check(desk: Desk, alone: list[Answer]) -> None:
    for number in desk.events.keys() & set(range(NUM_REQUESTS)):
        assert _answer(desk.events[number]) == alone[number], f"request {number} differs"


def test_answers_alone_cover_the_ways_to_end() -> None:
    finishes = [answer[-1][2] for answer in answers_alone()]
    assert min(finishes.count("stop"), finishes.count("length")) >= 20
    assert len({str(answer) for answer in answers_alone()}) == NUM_REQUESTS


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("max_rows", [2, 7, 32])
def test_answers_are_the_same_in_any_batch(max_rows: int, prefix_caching: bool) -> None:
    limits = _limits(max_rows)
    rng = random.Random(max_rows)
    desk = Desk(limits, VOCAB, pages=Pages(limits, prefix_caching))
    requests = make_requests(limits)
    rng.shuffle(requests)
    _run_together(desk, requests, rng)
    _check(desk, answers_alone())
    assert (desk.scheduler.num_prefix_hits > 0) == prefix_caching


def _squeeze(desk: Desk, request: Request, limits: Limits) -> None:
    """Run a request beside an older one whose prompt leaves it no block to grow into."""
    num_older = 2 * (SMALL_POOL - 1 - -(-request.num_prompt // 2))
    prompt = random.Random(request.id).choices(range(VOCAB), k=num_older)
    desk.submit(make_request(5000 + request.id, prompt, SamplingParams(ignore_eos=True), limits), request)
    desk.run()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_answers_are_the_same_when_every_request_was_preempted(prefix_caching: bool) -> None:
    limits = make_limits(block_size=2, max_rows=7, max_step_tokens=24, max_context=96, num_blocks=SMALL_POOL)
    rng = random.Random(5)
    desk = Desk(limits, VOCAB, pages=Pages(limits, prefix_caching))
    requests = make_requests(limits)
    rng.shuffle(requests)
    preempted = _run_together(desk, requests, rng)
    _check(desk, answers_alone())
    assert len(preempted) >= NUM_REQUESTS / 2
    limits = make_limits(block_size=2, max_rows=7, max_step_tokens=128, max_context=96, num_blocks=SMALL_POOL)
    desk = Desk(limits, VOCAB, pages=Pages(limits, prefix_caching))
    for request in make_requests(limits):
        if request.id not in preempted:
            _squeeze(desk, request, limits)
            assert request.num_preemptions >= 1
    _check(desk, answers_alone())


@pytest.mark.parametrize("max_rows", [1, 4])
def test_answers_are_the_same_after_a_forced_preemption_at_any_moment(max_rows: int) -> None:
    limits = _limits(max_rows)
    rng = random.Random(3)
    desk = Desk(limits, VOCAB)
    requests = make_requests(limits)[::4]
    desk.submit(*requests)
    live = {request.id: request for request in requests}
    while not desk.scheduler.is_idle:
        desk.step()
        live = {number: request for number, request in live.items() if desk.finish(number) is None}
        running = [request for request in live.values() if request.blocks]
        if running and rng.random() < 0.2:
            desk.scheduler.preempt(rng.choice(running))
    desk.check_idle()
    assert desk.scheduler.num_preemptions >= 20
    for request in requests:
        assert _answer(desk.events[request.id]) == answers_alone()[request.id]

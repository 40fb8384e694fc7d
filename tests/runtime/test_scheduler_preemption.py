"""A preempted request goes on as if nothing had been."""

from __future__ import annotations

from ostinato.runtime.request import SamplingParams
from tests.fakes import Desk, make_limits, make_request
from tests.scheduling import VOCAB, greedy, prompt_of


def test_a_preempted_request_loses_doubles_and_changes_nothing() -> None:
    params = SamplingParams(max_tokens=60, presence_penalty=0.7, logprobs=2, stop_token_ids=(3, 9), min_tokens=40)
    answers = []
    for num_blocks in (12, 1000):
        limits = make_limits(num_blocks=num_blocks)
        desk = Desk(limits, VOCAB)
        requests = [make_request(number, prompt_of(number, 20), params, limits) for number in range(80)]
        desk.submit(*requests)
        desk.run()
        answers.append(desk.events)
        assert all(request.num_prompt == 20 for request in requests)
        assert (desk.scheduler.num_preemptions >= 20) == (num_blocks == 12)
    tight, roomy = answers
    assert tight == roomy


def test_blocks_that_a_request_finds_again_are_not_cache_hits() -> None:
    limits = make_limits(max_step_tokens=16)
    desk = Desk(limits, VOCAB)
    request = make_request(0, prompt_of(0, 60), greedy(3), limits)
    desk.submit(request)
    for _ in range(3):
        desk.step()
    desk.scheduler.preempt(request)
    plan = desk.step()
    assert plan is not None
    assert plan.rows[0].start == 48
    desk.run()
    assert desk.events[0][0].num_cached == 0
    assert (desk.scheduler.num_prefix_queries, desk.scheduler.num_prefix_hits) == (60, 0)

"""Steps of the scheduler: what runs in which order, what is refused, who waits, who gives way, how requests end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from ostinato.engines.errors import RequestError
from ostinato.engines.sizes import Limits
from ostinato.runtime.pages import Pages
from ostinato.runtime.plan import Plan
from ostinato.runtime.request import Event, Request, SamplingParams, check_token_ids
from ostinato.runtime.scheduler import check_fits
from ostinato.runtime.waiting import MAX_OVERTAKES
from tests.fakes import Desk, ScriptedLM, make_limits, make_request

VOCAB = 96


def _greedy(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def _best(token_id: int) -> list[float]:
    return [float(token == token_id) for token in range(VOCAB)]


def _rows(plan: Plan | None) -> list[tuple[int, int, int]]:
    """(request, tokens, sampled) of each row."""
    return [] if plan is None else [(row.request.id, row.num_tokens, row.num_sampled) for row in plan.rows]


def _alone(request: Request, limits: Limits) -> list[Event]:
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(request.id, request.tokens[: request.num_prompt], request.params, limits))
    desk.run()
    return desk.events[request.id]


# What a step holds


def test_a_step_holds_decode_rows_then_chunks_then_new_rows() -> None:
    limits = make_limits(max_rows=4, max_step_tokens=16)
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(0, _prompt(0, 5), _greedy(9), limits))
    assert _rows(desk.step()) == [(0, 5, 1)]
    desk.submit(make_request(1, _prompt(1, 40), _greedy(9), limits), make_request(2, _prompt(2, 8), _greedy(9), limits))
    assert _rows(desk.step()) == [(0, 1, 1), (1, 15, 0)]
    assert _rows(desk.step()) == [(0, 1, 1), (1, 15, 0)]
    # The last chunk leaves 5 tokens; one of them is kept for the pad row of three in a bucket of four.
    assert _rows(desk.step()) == [(0, 1, 1), (1, 10, 1), (2, 4, 0)]
    assert _rows(desk.step()) == [(0, 1, 1), (1, 1, 1), (2, 4, 1)]
    assert _rows(desk.step()) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    desk.run()


def test_rows_and_tokens_of_a_step_are_bounded() -> None:
    limits = make_limits(max_rows=5, max_step_tokens=24, num_blocks=200)
    desk = Desk(limits, VOCAB)
    desk.submit(*(make_request(number, _prompt(number, number % 30 + 1), _greedy(6), limits) for number in range(40)))
    while (plan := desk.step()) is not None:
        assert len(plan.rows) <= 5
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows) <= 24
        assert plan.num_sampled == sum(row.num_sampled for row in plan.rows) <= 5
    desk.check_idle()


def test_a_lower_priority_number_starts_first_and_gives_way_last() -> None:
    limits = make_limits(block_size=4, max_rows=2, max_context=32, num_blocks=8)
    desk = Desk(limits, VOCAB)
    requests = [make_request(number, _prompt(number, 8), _greedy(20), limits) for number in range(3)]
    for request, priority in zip(requests, (1, 0, 0), strict=True):
        request.priority = priority
    desk.submit(*requests)
    assert [row[0] for row in _rows(desk.step())] == [1, 2]
    desk.run()
    assert requests[1].num_preemptions == 0
    assert requests[2].num_preemptions > 0


def test_an_older_row_of_a_lower_priority_gives_way() -> None:
    limits = make_limits(block_size=4, max_rows=2, max_context=32, num_blocks=8)
    desk = Desk(limits, VOCAB)
    older, newer = (make_request(number, _prompt(number, 8), _greedy(20), limits) for number in range(2))
    older.priority = 5
    desk.submit(older)
    desk.step()
    desk.submit(newer)
    desk.run()
    assert older.num_preemptions > 0
    assert newer.num_preemptions == 0


def test_a_preempted_request_returns_before_those_that_never_started() -> None:
    limits = make_limits(max_rows=2)
    desk = Desk(limits, VOCAB)
    requests = [make_request(number, _prompt(number, 20), _greedy(5), limits) for number in range(4)]
    desk.submit(*requests)
    desk.step()
    desk.scheduler.preempt(requests[1])
    desk.scheduler.preempt(requests[0])
    assert [row[0] for row in _rows(desk.step())] == [0, 1]
    desk.run()


# How requests end


def test_a_stop_token_is_counted_and_carried() -> None:
    limits = make_limits()
    desk = Desk(limits, VOCAB, ScriptedLM([_best(5), _best(6), _best(7)]))
    params = SamplingParams(temperature=0.0, max_tokens=10, stop_token_ids=(6,))
    desk.submit(make_request(0, [1], params, limits))
    desk.run()
    assert [(event.token_id, event.finish) for event in desk.events[0]] == [(5, None), (6, "stop")]


@pytest.mark.parametrize(("max_tokens", "finish"), [(1, "stop"), (4, "stop")])
def test_a_stop_token_at_the_last_place_is_a_stop(max_tokens: int, finish: str) -> None:
    limits = make_limits()
    desk = Desk(limits, VOCAB, ScriptedLM([_best(5)] * (max_tokens - 1) + [_best(6)]))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=(6,))
    desk.submit(make_request(0, [1], params, limits))
    desk.run()
    assert desk.finish(0) == finish
    assert len(desk.token_ids(0)) == max_tokens


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_stop_tokens_can_not_come_before_min_tokens(ignore_eos: bool) -> None:
    eos, stop, other = 6, 8, 3
    line = [3.0 if token == eos else 2.0 if token == stop else 1.0 if token == other else 0.0 for token in range(VOCAB)]
    limits = make_limits()
    desk = Desk(limits, VOCAB, ScriptedLM([line]))
    params = SamplingParams(
        temperature=0.0, max_tokens=6, min_tokens=3, stop_token_ids=(stop,), ignore_eos=ignore_eos, logprobs=0
    )
    desk.submit(make_request(0, [1], params, limits, eos=(eos,)))
    desk.run()
    assert desk.token_ids(0) == ([eos] * 6 if ignore_eos else [other] * 3 + [eos])
    assert desk.finish(0) == ("length" if ignore_eos else "stop")


def test_a_row_without_a_legal_token_fails_alone() -> None:
    limits = make_limits()
    desk = Desk(limits, VOCAB, ScriptedLM([[0.0] * VOCAB, [0.0 if token == 4 else -np.inf for token in range(VOCAB)]]))
    lost = SamplingParams(temperature=0.0, max_tokens=5, min_tokens=5, stop_token_ids=(4,))
    desk.submit(make_request(0, [1, 2], lost, limits), make_request(1, [1, 3], _greedy(5), limits))
    desk.run()
    assert desk.token_ids(1) == [0, 4, 4, 4, 4]
    assert desk.finish(1) == "length"
    assert desk.token_ids(0) == [0]
    last = desk.events[0][-1]
    assert last.finish == "error"
    assert last.error is not None
    assert last.error.code == "no_legal_token"


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_an_abort_gives_blocks_back_by_the_next_plan(steps: int) -> None:
    limits = make_limits(max_step_tokens=8)
    desk = Desk(limits, VOCAB)
    kept = make_request(0, _prompt(0, 20), _greedy(12), limits)
    desk.submit(kept, make_request(1, _prompt(1, 30), _greedy(50), limits))
    for _ in range(steps):
        desk.step()
    desk.abort(1)
    assert desk.finish(1) == "abort"
    assert desk.pages.num_total - desk.pages.num_free == len(kept.blocks)
    desk.abort(1)  # twice is once
    desk.run()
    assert [event._replace(num_cached=0) for event in desk.events[0]] == _alone(kept, limits)
    assert len(desk.events[1]) == len(desk.token_ids(1)) + 1


def test_an_abort_while_the_step_runs_drops_its_token() -> None:
    limits = make_limits()
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(0, [1], _greedy(5), limits), make_request(1, [2], _greedy(5), limits))
    desk.step()
    plan = desk.scheduler.plan()
    assert plan is not None
    sampled = desk.executor.run(desk.packer.pack(plan)).wait()
    desk.abort(0)
    assert [event.request_id for event in desk.scheduler.commit(plan, sampled)] == [1]
    assert desk.pages.num_total - desk.pages.num_free == 1
    desk.run()
    assert desk.scheduler.abort(0) is None


def test_a_failed_step_ends_its_own_requests_and_shares_nothing() -> None:
    limits = make_limits(max_rows=2)
    desk = Desk(limits, VOCAB)
    requests = [make_request(number, _prompt(7, 40), _greedy(5), limits) for number in range(3)]
    desk.submit(*requests)
    plan = desk.scheduler.plan()
    assert plan is not None
    desk.abort(0)
    events = desk.scheduler.fail(plan, RequestError("the device is gone", code="internal_error"))
    assert [(event.request_id, event.finish) for event in events] == [(1, "error")]
    desk.pages.check_integrity()
    desk.run()
    assert desk.finish(2) == "length"
    assert requests[2].num_cached == 0


# Prompt logprobs


def _scoring(max_tokens: int, prompt_logprobs: int | None = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=1, prompt_logprobs=prompt_logprobs)


def _scores(prompt: Sequence[int], limits: Limits) -> list[float]:
    """Each prompt token's logprob as a generated one, after the tokens before it; -inf if it is not among the best."""
    scores = []
    for index in range(1, len(prompt)):
        desk = Desk(limits, VOCAB)
        desk.submit(make_request(0, prompt[:index], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20), limits))
        desk.run()
        logprob = desk.events[0][0].logprob
        assert logprob is not None
        scores.append(dict(logprob.top).get(prompt[index], -np.inf))
    return scores


@pytest.mark.parametrize("max_rows", [1, 3, 8])
def test_prompt_logprobs_are_those_of_generation(max_rows: int) -> None:
    limits = make_limits(max_rows=max_rows, max_step_tokens=8)
    prompt = _prompt(4, 33)
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(0, prompt, _scoring(2, 20), limits))
    desk.run()
    first, second = desk.events[0]
    assert second.prompt_logprobs is None
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    scored = [logprob for logprob in first.prompt_logprobs[1:] if logprob is not None]
    assert [logprob.token_id for logprob in scored] == prompt[1:]
    expected = _scores(prompt, limits)
    num_ranked = 0
    for logprob, score in zip(scored, expected, strict=True):
        assert len(logprob.top) == 20
        if np.isfinite(score):
            num_ranked += 1
            assert logprob.logprob == pytest.approx(score, abs=1e-6)
        else:
            assert logprob.logprob <= logprob.top[-1][1]
    assert num_ranked >= 3


@pytest.mark.parametrize("order", [(0, 0), (0, 1), (1, 0), (2, 0, 0)])
def test_prompt_logprobs_do_not_depend_on_the_prefix_cache(order: Sequence[int]) -> None:
    limits = make_limits(max_step_tokens=8)
    prompt = _prompt(4, 33)
    prompts = [prompt, prompt + _prompt(5, 7), prompt]
    fresh = Desk(limits, VOCAB, pages=Pages(limits, prefix_caching=False))
    desk = Desk(limits, VOCAB)
    for number, which in enumerate(order):
        params = _scoring(1) if which < 2 else _greedy(1)
        for each in (fresh, desk):
            each.submit(make_request(number, prompts[which], params, limits))
            each.run()
    assert desk.events == fresh.events
    assert all(event.num_cached == 0 for events in desk.events.values() for event in events)
    desk.submit(make_request(99, prompt, _scoring(1, None), limits))  # others may share what was scored
    desk.run()
    assert desk.events[99][0].num_cached == 32


def test_scoring_without_output_ends_with_length_and_no_token() -> None:
    limits = make_limits(max_rows=4)
    desk = Desk(limits, VOCAB)
    prompt = _prompt(4, 21)
    desk.submit(make_request(0, prompt, _scoring(0), limits), make_request(1, prompt, _scoring(3), limits))
    desk.submit(make_request(2, prompt, _scoring(0, None), limits), make_request(3, [5], _scoring(0), limits))
    assert desk.finish(2) == "length"  # there is nothing to compute
    desk.run()
    assert [event._replace(prompt_logprobs=None) for event in desk.events[0]] == [Event(0, None, None, "length")]
    assert desk.events[0][0].prompt_logprobs == desk.events[1][0].prompt_logprobs
    assert desk.events[2] == [Event(2, None, None, "length")]
    assert desk.events[3] == [Event(3, None, None, "length", prompt_logprobs=(None,))]


def test_penalties_and_bias_leave_prompt_logprobs_alone() -> None:
    limits = make_limits()
    desk = Desk(limits, VOCAB)
    prompt = _prompt(4, 21)
    odd = SamplingParams(
        repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((prompt[3], 50.0),), max_tokens=2, prompt_logprobs=3
    )
    desk.submit(make_request(0, prompt, _scoring(2, 3), limits), make_request(1, prompt, odd, limits))
    desk.run()
    assert desk.events[0][0].prompt_logprobs == desk.events[1][0].prompt_logprobs


# Preemption


def test_a_preempted_request_loses_doubles_and_changes_nothing() -> None:
    params = SamplingParams(max_tokens=60, presence_penalty=0.7, logprobs=2, stop_token_ids=(3, 9), min_tokens=40)
    answers = []
    for num_blocks in (12, 1000):
        limits = make_limits(num_blocks=num_blocks)
        desk = Desk(limits, VOCAB)
        requests = [make_request(number, _prompt(number, 20), params, limits) for number in range(80)]
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
    request = make_request(0, _prompt(0, 60), _greedy(3), limits)
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


# Waiting


def test_a_request_that_can_never_fit_is_refused_and_others_run() -> None:
    limits = make_limits(max_context=4096, num_blocks=64)
    assert limits.max_context == 1024  # clamped to the pool
    with pytest.raises(RequestError, match=r"1500 tokens.*1024") as refused:
        check_fits(1500, None, limits)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(RequestError, match=r"1000 tokens and max_tokens is 500") as refused:
        check_fits(1000, 500, limits)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_tokens")
    desk = Desk(limits, VOCAB)
    largest = make_request(0, _prompt(0, 1000), SamplingParams(ignore_eos=True), limits)
    desk.submit(largest, *(make_request(number, _prompt(number, 10), _greedy(4), limits) for number in range(1, 21)))
    desk.run(max_steps=400)
    assert [desk.finish(number) for number in range(21)] == ["length"] * 21
    assert largest.num_output == 24


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [
        (126, None, 2),
        (126, 0, 0),
        (126, 2, 2),
        (126, 3, None),
        (127, None, 1),
        (127, 0, 0),
        (127, 1, 1),
        (127, 2, None),
        (127, 10**9, None),
        (128, None, None),
        (128, 0, None),
        (128, 1, None),
        (129, None, None),
        (129, 0, None),
    ],
)
def test_the_context_edge(num_prompt: int, max_tokens: int | None, expected: int | None) -> None:
    limits = make_limits(max_context=128)
    if expected is not None:
        assert check_fits(num_prompt, max_tokens, limits) == expected
        desk = Desk(limits, VOCAB)
        desk.submit(make_request(0, _prompt(0, num_prompt), SamplingParams(max_tokens=max_tokens), limits))
        desk.run()
        assert (len(desk.token_ids(0)), desk.finish(0)) == (expected, "length")
        return
    with pytest.raises(RequestError) as refused:
        check_fits(num_prompt, max_tokens, limits)
    assert refused.value.code == "context_length_exceeded"
    assert str(num_prompt) in str(refused.value)
    assert "128" in str(refused.value)
    assert "-" not in str(refused.value)


def test_light_requests_pass_a_heavy_one_and_do_not_starve_it() -> None:
    """A long run holds 53 to 64 of 100 blocks, a heavy waiter needs 50, a light one comes every other step."""
    limits = make_limits(max_rows=64, max_context=1024, max_step_tokens=1024, num_blocks=100)
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(0, _prompt(0, 832), _greedy(190), limits))
    desk.step()
    desk.submit(make_request(1, _prompt(1, 800), _greedy(5), limits))
    started: dict[int, int] = {}
    arrived: dict[int, int] = {}
    long_ended = 0
    for step in range(600):
        if step % 2 == 0:
            arrived[100 + step] = step
            desk.submit(make_request(100 + step, _prompt(step, 10), _greedy(3), limits))
        for request_id, _, _ in _rows(desk.step()):
            started.setdefault(request_id, step)
        if desk.finish(0) is None:
            long_ended = step + 1
    assert 100 < long_ended < 500
    assert started[1] - long_ended <= 1, "the heavy one did not get its turn"
    waits = {number: started[number] - step for number, step in arrived.items()}
    passed = [number for number in arrived if started[number] < started[1]]
    assert len(passed) == MAX_OVERTAKES
    assert all(waits[number] == 0 for number in passed), "a light one that fits waited before the bound"
    assert (
        max(started[number] - max(step, started[1]) for number, step in arrived.items() if number not in passed) <= 30
    )
    desk.run()
    assert all(desk.finish(number) == "length" for number in (0, 1, *arrived))


def test_a_stuck_line_moves_when_a_waiter_leaves() -> None:
    limits = make_limits(max_rows=8, max_context=512, max_step_tokens=512, num_blocks=40)
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(0, _prompt(0, 300), _greedy(200), limits))
    desk.step()
    desk.submit(make_request(1, _prompt(1, 400), _greedy(5), limits))
    for waiter in desk.scheduler._line.ahead():
        waiter.num_overtaken = MAX_OVERTAKES
    light = make_request(2, _prompt(2, 10), _greedy(5), limits)
    desk.submit(light)
    desk.step()
    assert not light.blocks
    desk.abort(1)
    desk.step()
    assert light.blocks
    desk.run()


# Seeds and neighbours


@pytest.mark.parametrize("num_neighbours", [0, 1, 6, 63])
@pytest.mark.parametrize("delay", [0, 5])
def test_a_seed_holds_beside_any_neighbours(num_neighbours: int, delay: int) -> None:
    limits = make_limits(max_rows=64, max_step_tokens=128, num_blocks=400)
    params = SamplingParams(temperature=0.8, seed=42, max_tokens=32)
    expected = _alone(make_request(0, _prompt(0, 12), params, limits), limits)
    for is_first in (True, False):
        for seed in (None, 42):
            desk = Desk(limits, VOCAB)
            request = make_request(0, _prompt(0, 12), params, limits)
            others = [
                make_request(number, _prompt(number, 9), SamplingParams(seed=seed, max_tokens=40), limits)
                for number in range(1, num_neighbours + 1)
            ]
            if not is_first:
                desk.submit(*others)
            for _ in range(delay):
                desk.step()
            desk.submit(request)
            if is_first:
                desk.submit(*others)
            while request.num_output < 3:
                desk.step()
            desk.scheduler.preempt(request)
            desk.run()
            assert desk.events[0] == expected


def _choices(params: SamplingParams, count: int, limits: Limits, seeds: Sequence[int] | None = None) -> list[list[int]]:
    desk = Desk(limits, VOCAB, ScriptedLM([[0.0] * VOCAB]))
    for choice in range(count):
        request = make_request(choice, [1, 2, 3], params, limits, choice=0 if seeds else choice)
        request.seed = seeds[choice] if seeds else request.seed
        desk.submit(request)
    desk.run()
    return [desk.token_ids(choice) for choice in range(count)]


def test_choices_of_one_seed_differ_and_repeat() -> None:
    limits = make_limits()
    params = SamplingParams(seed=7, max_tokens=12)
    first, second = _choices(params, 8, limits), _choices(params, 8, limits)
    assert first == second
    assert len({tuple(choice) for choice in first}) == 8
    fresh = _choices(SamplingParams(max_tokens=12), 8, limits, seeds=range(1000, 1008))
    assert len({tuple(choice) for choice in fresh}) == 8
    greedy = _choices(SamplingParams(seed=7, temperature=0.0, max_tokens=12), 3, limits)
    assert greedy[0] == greedy[1] == greedy[2]


@pytest.mark.parametrize("stop_id", [VOCAB, VOCAB + 3, -1])
def test_an_unknown_stop_id_is_refused(stop_id: int) -> None:
    with pytest.raises(RequestError) as refused:
        check_token_ids("stop_token_ids", (stop_id,), VOCAB)
    assert refused.value.param == "stop_token_ids"


def test_masks_of_one_row_leave_its_neighbour_alone() -> None:
    limits = make_limits()
    line = [2.0 if token == 3 else 1.0 if token == 4 else 0.0 for token in range(VOCAB)]
    desk = Desk(limits, VOCAB, ScriptedLM([line]))
    masked = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=4, stop_token_ids=(3,))
    desk.submit(make_request(0, [1], masked, limits), make_request(1, [1], _greedy(6), limits))
    desk.run()
    assert desk.token_ids(0) == [4, 4, 4, 4, 3]
    assert desk.token_ids(1) == [3] * 6

"""How requests end: stop tokens, lengths, aborts, failures."""

from __future__ import annotations

import numpy as np
import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.request import STEP_FAILED, SamplingParams
from tests.fakes import Desk, ScriptedLM, make_limits, make_request
from tests.scheduling import VOCAB, alone, best, greedy, prompt_of


def test_a_stop_token_is_counted_and_carried() -> None:
    limits = make_limits()
    desk = Desk(limits, VOCAB, ScriptedLM([best(5), best(6), best(7)]))
    params = SamplingParams(temperature=0.0, max_tokens=10, stop_token_ids=(6,))
    desk.submit(make_request(0, [1], params, limits))
    desk.run()
    assert [(event.token_id, event.finish) for event in desk.events[0]] == [(5, None), (6, "stop")]


@pytest.mark.parametrize(("max_tokens", "finish"), [(1, "stop"), (4, "stop")])
def test_a_stop_token_at_the_last_place_is_a_stop(max_tokens: int, finish: str) -> None:
    limits = make_limits()
    desk = Desk(limits, VOCAB, ScriptedLM([best(5)] * (max_tokens - 1) + [best(6)]))
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
    desk.submit(make_request(0, [1, 2], lost, limits), make_request(1, [1, 3], greedy(5), limits))
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
    kept = make_request(0, prompt_of(0, 20), greedy(12), limits)
    desk.submit(kept, make_request(1, prompt_of(1, 30), greedy(50), limits))
    for _ in range(steps):
        desk.step()
    desk.abort(1)
    assert desk.finish(1) == "abort"
    assert desk.pages.num_total - desk.pages.num_free == len(kept.blocks)
    desk.abort(1)  # twice is once
    desk.run()
    assert [event._replace(num_cached=0) for event in desk.events[0]] == alone(kept, limits)
    assert len(desk.events[1]) == len(desk.token_ids(1)) + 1


def test_an_abort_while_the_step_runs_drops_its_token() -> None:
    limits = make_limits()
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(0, [1], greedy(5), limits), make_request(1, [2], greedy(5), limits))
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
    requests = [make_request(number, prompt_of(7, 40), greedy(5), limits) for number in range(3)]
    desk.submit(*requests)
    plan = desk.scheduler.plan()
    assert plan is not None
    desk.abort(0)
    events = desk.scheduler.fail(plan, RequestError("the device is gone", code=STEP_FAILED))
    assert [(event.request_id, event.finish) for event in events] == [(1, "error")]
    desk.pages.check_integrity()
    desk.run()
    assert desk.finish(2) == "length"
    assert requests[2].num_cached == 0

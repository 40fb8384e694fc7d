"""A seed's tokens hold beside any neighbours; parameters of one row leave the others alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ostinato.engines.errors import RequestError
from ostinato.engines.sizes import Limits
from ostinato.runtime.request import SamplingParams, check_token_ids
from tests.fakes import Desk, ScriptedLM, make_limits, make_request
from tests.scheduling import VOCAB, alone, greedy, prompt_of


@pytest.mark.parametrize("num_neighbours", [0, 1, 6, 63])
@pytest.mark.parametrize("delay", [0, 5])
def test_a_seed_holds_beside_any_neighbours(num_neighbours: int, delay: int) -> None:
    limits = make_limits(max_rows=64, max_step_tokens=128, num_blocks=400)
    params = SamplingParams(temperature=0.8, seed=42, max_tokens=32)
    expected = alone(make_request(0, prompt_of(0, 12), params, limits), limits)
    for is_first in (True, False):
        for seed in (None, 42):
            desk = Desk(limits, VOCAB)
            request = make_request(0, prompt_of(0, 12), params, limits)
            others = [
                make_request(number, prompt_of(number, 9), SamplingParams(seed=seed, max_tokens=40), limits)
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
    desk.submit(make_request(0, [1], masked, limits), make_request(1, [1], greedy(6), limits))
    desk.run()
    assert desk.token_ids(0) == [4, 4, 4, 4, 3]
    assert desk.token_ids(1) == [3] * 6

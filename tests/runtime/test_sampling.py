"""Sampling lines: each carries its own request's parameters, kept and refreshed as the rows change."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from ostinato.plugins.philox import uniforms
from ostinato.plugins.sampling_rows import I32, SamplingRows
from ostinato.runtime.plan import PlanRow
from ostinato.runtime.request import Request, SamplingParams
from ostinato.runtime.row_sets import RowSets
from ostinato.runtime.sampling import SamplingPacker
from tests.fakes import make_limits, make_request
from tests.guides import Endless

VOCAB = 70
LIMITS = make_limits()


def _request(number: int, params: SamplingParams, output: list[int], stop_ids: tuple[int, ...] = ()) -> Request:
    request = make_request(number, [1, 2, 2, 5], params, LIMITS, eos=stop_ids, choice=number % 3)
    request.tokens += output
    return request


class _Packer:
    """The sampling packer over columns that follow it from step to step."""

    def __init__(self) -> None:
        self._row_sets = RowSets(LIMITS.max_rows, 1)
        self._packer = SamplingPacker(VOCAB, LIMITS.max_rows)

    def pack(self, rows: list[PlanRow]) -> SamplingRows:
        return self._packer.pack(self._row_sets.columns(rows))


def _last(*requests: Request) -> list[PlanRow]:
    return [PlanRow(request, len(request.tokens) - 1, len(request.tokens), 1) for request in requests]


def _bits(rows: SamplingRows, line: int) -> set[int]:
    """Allowed token ids of a line."""
    assert rows.allowed is not None
    words = rows.allowed[line].view(np.uint32)
    return {token for token in range(VOCAB) if words[token // 32] >> (token % 32) & 1}


def test_a_line_carries_its_parameters() -> None:
    odd = SamplingParams(
        temperature=0.7,
        top_k=10**12,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((3, 1.5), (69, -100.0)),
        logprobs=4,
        seed=-5,
    )
    plain = SamplingParams(temperature=0.0, top_k=-1)
    rows = _Packer().pack(_last(_request(0, plain, []), _request(1, odd, [7, 7])))
    np.testing.assert_array_equal(rows.temperature, np.array([0, 0.7], np.float32))
    np.testing.assert_array_equal(rows.top_k, [0, VOCAB])
    np.testing.assert_array_equal(rows.top_p, np.array([1, 0.9], np.float32))
    np.testing.assert_array_equal(rows.min_p, np.array([0, 0.1], np.float32))
    np.testing.assert_array_equal(rows.repetition, np.array([1, 1.2], np.float32))
    np.testing.assert_array_equal(rows.presence, np.array([0, 0.5], np.float32))
    np.testing.assert_array_equal(rows.frequency, np.array([0, -0.5], np.float32))
    np.testing.assert_array_equal(rows.bias_ids, [[-1, -1], [3, 69]])
    np.testing.assert_array_equal(rows.bias_values, np.array([[0, 0], [1.5, -100]], np.float32))
    np.testing.assert_array_equal(rows.num_logprobs, [-1, 4])
    assert rows.allowed is None
    assert rows.prompt_counts[0] is None
    assert rows.output_counts[0] is None
    expected = uniforms(np.array([0, 2**64 - 5], np.uint64), np.array([0, 1], np.uint32), np.array([0, 2], np.uint32))
    np.testing.assert_array_equal(rows.uniforms, expected)


def test_counts_follow_the_tokens_through_any_rows() -> None:
    rng = random.Random(0)
    packer = _Packer()
    penal = SamplingParams(presence_penalty=1.0)
    requests = [_request(number, penal if number % 2 else SamplingParams(), []) for number in range(6)]
    for _ in range(60):
        chosen = rng.sample(requests, rng.randint(1, 6))
        rows = packer.pack(_last(*chosen))
        for line, request in enumerate(chosen):
            prompt, output = rows.prompt_counts[line], rows.output_counts[line]
            assert (prompt is None) == (output is None) == (request.id % 2 == 0)
            if prompt is not None and output is not None:
                assert Counter(dict(enumerate(prompt.tolist()))) == Counter(request.tokens[:4])
                assert Counter(dict(enumerate(output.tolist()))) == Counter(request.tokens[4:])
        for request in chosen:
            request.tokens += rng.choices(range(VOCAB), k=rng.choice([1, 1, 2]))


def test_uniforms_are_a_function_of_seed_choice_and_output_index() -> None:
    rng = random.Random(1)
    packer = _Packer()
    requests = [_request(number, SamplingParams(seed=number * 2**60), []) for number in range(5)]
    for _ in range(80):
        chosen = requests if rng.random() < 0.8 else rng.sample(requests, 3)
        seeds = np.array([request.seed for request in chosen], np.uint64)
        choices = np.array([request.choice for request in chosen], np.uint32)
        indices = np.array([len(request.tokens) - 4 for request in chosen], np.uint32)
        rows = packer.pack(_last(*chosen))
        np.testing.assert_array_equal(rows.uniforms, uniforms(seeds, choices, indices))
        for request in chosen:
            request.tokens += [3] * rng.choice([1] * 9 + [2])


def test_nothing_is_made_again_while_greedy_rows_stay() -> None:
    packer = _Packer()
    requests = [_request(number, SamplingParams(temperature=0.0), []) for number in range(3)]
    first = packer.pack(_last(*requests))
    for request in requests:
        request.tokens.append(4)
    assert packer.pack(_last(*requests)) is first
    assert packer.pack(_last(*requests[::-1])) is not first


def test_stop_ids_are_masked_until_min_tokens_in_their_own_line() -> None:
    packer = _Packer()
    guarded = _request(0, SamplingParams(min_tokens=2, max_tokens=9), [], stop_ids=(0, 31, 32, 69))
    other = _request(1, SamplingParams(max_tokens=9), [], stop_ids=(5,))
    everything = set(range(VOCAB))
    for _ in range(2):
        rows = packer.pack(_last(guarded, other))
        assert _bits(rows, 0) == everything - {0, 31, 32, 69}
        assert _bits(rows, 1) == everything
        guarded.tokens.append(9)
    assert packer.pack(_last(guarded, other)).allowed is None


@pytest.mark.parametrize("stop_id", [VOCAB, VOCAB + 3])
def test_an_unknown_stop_id_reaches_no_other_line(stop_id: int) -> None:
    bad = _request(0, SamplingParams(min_tokens=2, max_tokens=9), [], stop_ids=(stop_id,))
    rows = _Packer().pack(_last(bad, _request(1, SamplingParams(), [])))
    assert _bits(rows, 0) == _bits(rows, 1) == set(range(VOCAB))


def test_scored_positions_are_forced_to_the_prompt() -> None:
    params = SamplingParams(
        presence_penalty=1.0, logit_bias=((2, 5.0),), min_tokens=1, max_tokens=3, logprobs=2, prompt_logprobs=3
    )
    request = _request(0, params, [], stop_ids=(2, 9))
    packer = _Packer()
    rows = packer.pack([PlanRow(request, 0, 4, 4)])
    assert [_bits(rows, line) for line in range(3)] == [{2}, {2}, {5}]
    assert _bits(rows, 3) == set(range(VOCAB)) - {2, 9}
    np.testing.assert_array_equal(rows.num_logprobs, [3, 3, 3, 2])
    np.testing.assert_array_equal(rows.presence, [0, 0, 0, 1])
    np.testing.assert_array_equal(rows.bias_ids, [[-1], [-1], [-1], [2]])
    assert [counts is None for counts in rows.output_counts] == [True, True, True, False]
    request.tokens.append(8)
    assert packer.pack(_last(request)).allowed is None


class _Odd(Endless):
    """Allows odd tokens only, or fails."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self._is_broken = is_broken

    def fill_mask(self, words: I32) -> None:
        if self._is_broken:
            raise ValueError("no such state")
        words.view(np.uint32)[:] = 0xAAAAAAAA

    def accept(self, token_id: int) -> None: ...


def test_a_guide_is_asked_for_its_own_line_and_min_tokens_hold_beside_it() -> None:
    guided = _request(0, SamplingParams(min_tokens=2, max_tokens=9), [], stop_ids=(1, 33))
    broken, plain = _request(1, SamplingParams(), []), _request(2, SamplingParams(), [])
    guided.guide, broken.guide = _Odd(), _Odd(is_broken=True)
    packer = _Packer()
    odd = set(range(1, VOCAB, 2))
    for expected in (odd - {1, 33}, odd - {1, 33}, odd):
        rows = packer.pack(_last(plain, guided, broken))
        assert [_bits(rows, line) for line in range(3)] == [set(range(VOCAB)), expected, set()]
        guided.tokens.append(3)

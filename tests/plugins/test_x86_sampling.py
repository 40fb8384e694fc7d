"""FusedSampling in C: what the other kernels are tested for, the oracle's tokens, and a row that stands alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from ostinato.builder.c_compiler import compile_kernels
from ostinato.engines.errors import BundleError, DeviceError
from ostinato.engines.processor import why_no_kernels
from ostinato.plugins.fused_sampling import fused_sampling, kept_probabilities
from ostinato.plugins.philox import uniforms
from ostinato.plugins.sampling_rows import Sampled, SamplingRows
from ostinato.runtime.x86_sampler import X86Sampler
from tests.scale import scaled

# Collected here once more: their `sample` and `host_sample` are the fixtures below.
from .test_fused_sampling import (
    line_of,
    mixed_rows,
    near_edge,
    take_rows,
)
from .test_fused_sampling import test_host_kernel_at_a_real_vocabulary as test_host_kernel_at_a_real_vocabulary
from .test_fused_sampling import test_host_kernel_leaves_logits_alone as test_host_kernel_leaves_logits_alone
from .test_fused_sampling import (
    test_host_kernel_leaves_what_was_not_asked_for_blank as test_host_kernel_leaves_what_was_not_asked_for_blank,
)
from .test_fused_sampling import (
    test_row_without_a_legal_token_is_an_error_of_its_own as test_row_without_a_legal_token_is_an_error_of_its_own,
)
from .test_sampling_settings import test_bias_and_penalties_by_hand as test_bias_and_penalties_by_hand
from .test_sampling_settings import (
    test_chosen_token_has_its_entrys_logprob_at_every_rank as test_chosen_token_has_its_entrys_logprob_at_every_rank,
)
from .test_sampling_settings import test_exact_edges as test_exact_edges
from .test_sampling_settings import test_greedy_ties_take_the_lowest_id as test_greedy_ties_take_the_lowest_id
from .test_sampling_settings import (
    test_host_kernel_draws_from_the_defined_distribution as test_host_kernel_draws_from_the_defined_distribution,
)
from .test_sampling_settings import (
    test_logprobs_are_of_the_model_not_of_the_draw as test_logprobs_are_of_the_model_not_of_the_draw,
)
from .test_sampling_settings import test_logprobs_do_not_depend_on_k as test_logprobs_do_not_depend_on_k
from .test_sampling_settings import test_ties_go_to_the_lowest_ids as test_ties_go_to_the_lowest_ids
from .test_sampling_settings import test_tiny_temperature_is_argmax as test_tiny_temperature_is_argmax
from .test_sampling_settings import test_truncation_off_edge_and_on as test_truncation_off_edge_and_on

Array = NDArray[Any]
Sample = Callable[[Array, SamplingRows], Sampled]
MakeRows = Callable[..., SamplingRows]

pytestmark = [
    pytest.mark.xdist_group("tiny x86 bundles"),  # compiled once, in one process
    pytest.mark.skipif(why_no_kernels() is not None, reason=f"this machine {why_no_kernels()}"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_kernels(tmp_path_factory.mktemp("kernels"))))


@pytest.fixture(scope="module")
def host_sample(library: ctypes.CDLL) -> Iterator[Sample]:
    """One sampler of two threads a vocabulary size."""
    samplers: dict[int, X86Sampler] = {}

    def sample(logits: Array, rows: SamplingRows) -> Sampled:
        size = logits.shape[1]
        if size not in samplers:
            samplers[size] = X86Sampler(library, size, 2)
        return samplers[size].sample(np.ascontiguousarray(logits, np.float32), rows)

    yield sample
    for sampler in samplers.values():
        sampler.close()


@pytest.fixture
def sample(host_sample: Sample) -> Sample:
    return host_sample


@pytest.mark.parametrize(
    ("size", "count"), [(97, 480), (1000, 320), (5003, 240), (49_152, scaled(20, 200))], ids=lambda number: str(number)
)
def test_agrees_with_the_oracle(size: int, count: int, make_rows: MakeRows, host_sample: Sample) -> None:
    logits, rows = mixed_rows(np.random.default_rng(size), make_rows, count, size)
    oracle, sampled = fused_sampling(logits, rows), host_sample(logits, rows)
    differs = np.flatnonzero(sampled.tokens != oracle.tokens).tolist()
    assert len(differs) <= 0.005 * count
    assert all(near_edge(logits, rows, row) for row in differs)
    assert 0 < np.count_nonzero(oracle.tokens == -1) < 0.1 * count
    same = sampled.tokens == oracle.tokens
    np.testing.assert_allclose(sampled.logprobs[same], oracle.logprobs[same], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(sampled.top_ids, oracle.top_ids)
    np.testing.assert_allclose(sampled.top_logprobs, oracle.top_logprobs, atol=1e-5, rtol=0)


def same_bits(many: Sampled, at: int, one: Sampled) -> bool:
    k = one.top_ids.shape[1]
    return bool(
        many.tokens[at] == one.tokens[0]
        and many.logprobs[at].tobytes() == one.logprobs[0].tobytes()
        and many.top_ids[at, :k].tobytes() == one.top_ids[0].tobytes()
        and many.top_logprobs[at, :k].tobytes() == one.top_logprobs[0].tobytes()
    )


@pytest.mark.parametrize("size", [64, 1503, 5003])
def test_row_has_its_bits_in_any_batch_on_any_number_of_threads(
    size: int, make_rows: MakeRows, library: ctypes.CDLL
) -> None:
    logits, rows = mixed_rows(np.random.default_rng(1), make_rows, 80, size)
    samplers = [X86Sampler(library, size, threads) for threads in (1, 2, 3)]
    batches = [sampler.sample(logits, rows) for sampler in samplers for _ in range(3)]
    backwards = samplers[2].sample(logits[::-1].copy(), take_rows(rows, slice(None, None, -1)))
    for row in range(80):
        alone = samplers[0].sample(logits[row : row + 1], line_of(rows, row))
        assert all(same_bits(batch, row, alone) for batch in batches)
        assert same_bits(backwards, 79 - row, alone)
    for sampler in samplers:
        sampler.close()
        sampler.close()  # as harmless as once


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 2000, "min_p": 0.01}],
    ids=str,
)
def test_draws_from_the_oracles_distribution_at_a_real_vocabulary(
    settings: dict[str, float], make_rows: MakeRows, host_sample: Sample
) -> None:
    """Chi-square over runs of ids that weigh about a fortieth each."""
    size, draws, batch = 49_152, scaled(4_096, 200_000) // 64 * 64, 64
    logits = (np.random.default_rng(11).standard_normal((1, size)) * 2).astype(np.float32)
    shares = kept_probabilities(logits[0], np.full(size, True), make_rows(1, **settings), 0)
    ends = np.unique(np.searchsorted(np.cumsum(shares), np.arange(1, 40) / 40))
    drawn = uniforms(np.full(draws, 5, np.uint64), np.zeros(draws, np.uint32), np.arange(draws, dtype=np.uint32))
    tiled, tokens = np.repeat(logits, batch, axis=0), []
    for first in range(0, draws, batch):
        rows = make_rows(batch, uniforms=drawn[first : first + batch], **settings)
        tokens += host_sample(tiled, rows).tokens.tolist()
    assert (shares[tokens] > 0).all()
    runs = np.searchsorted(ends, tokens, side="right")
    expected = np.add.reduceat(shares, np.concatenate([[0], ends]))
    assert stats.chisquare(np.bincount(runs, minlength=len(expected)), expected * draws).pvalue > 0.001


@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 32, 33, 255, 257, 1023, 1025, 2048])
def test_ends_of_vectors_words_and_blocks(size: int, make_rows: MakeRows, host_sample: Sample) -> None:
    """Only the last tokens are any good, or legal; bits past the vocabulary mean nothing."""
    logits = np.full((6, size), -3, np.float32)
    logits[:, -1] = [5, 5, -3, -3, np.nan, np.inf]
    words = np.full((6, -(-size // 32)), -1, np.int32)
    words[2] = 0
    words[2:4, -1] = np.uint32(1 << (size - 1) % 32).astype(np.int32)  # the other words of row 3 allow all
    words[0, -1] &= np.int32((1 << (size - 1) % 32 + 1) - 1 if size % 32 else -1)
    settings = {
        "temperature": [0.2, 0, 1, 1, 1, 0],
        "top_p": [1, 1, 0.9, 1, 1, 1],
        "uniforms": 0.999,
        "num_logprobs": 1,
    }
    rows = make_rows(6, **settings, allowed=words)
    sampled, oracle = host_sample(logits, rows), fused_sampling(logits, rows)
    np.testing.assert_array_equal(sampled.tokens, oracle.tokens)
    assert sampled.tokens[[0, 1, 2, 4, 5]].tolist() == [size - 1] * 3 + [-1, -1]
    np.testing.assert_array_equal(sampled.top_ids, oracle.top_ids)
    np.testing.assert_allclose(sampled.top_logprobs, oracle.top_logprobs, atol=1e-5)


SPREADS: dict[str, Callable[[np.random.Generator], Array]] = {
    "all equal": lambda _: np.full(3000, 2.5),
    "zeros of both signs": lambda rng: np.where(rng.random(3000) < 0.5, 0.0, -0.0),
    "subnormal": lambda rng: rng.integers(-3, 3, 3000) * 1.4e-45,
    "every size": lambda rng: 10.0 ** rng.uniform(-40, 38, 3000) * rng.choice([-1, 1], 3000),
    "the largest": lambda rng: rng.choice([-3.4e38, 0, 3.4e38], 3000),
    "one legal": lambda _: np.where(np.arange(3000) == 1234, 0.0, -np.inf),
    "coarse": lambda rng: np.round(rng.standard_normal(3000) * 3) / 2,
    "neighbours": lambda rng: np.nextafter(np.float32(1), np.float32(2)) - rng.integers(0, 9, 3000) * 2.0**-23,
}


@pytest.mark.parametrize("spread", SPREADS)
def test_ties_and_extreme_logits(spread: str, make_rows: MakeRows, host_sample: Sample) -> None:
    rng, count = np.random.default_rng(7), 48
    logits = np.tile(SPREADS[spread](rng).astype(np.float32), (count, 1))
    rows = make_rows(
        count,
        uniforms=rng.random(count, np.float32),
        temperature=rng.choice([0, 0.5, 1, 1e4], count),
        top_k=rng.choice([0, 1, 5, 40, 2000], count),
        top_p=rng.choice([0, 0.3, 0.9, 1], count),
        min_p=rng.choice([0, 0.1, 0.9], count),
        allowed=rng.choice([-1, 0x5A5A5A5A], (count, 1)).repeat(94, axis=1).astype(np.int32),
        num_logprobs=rng.choice([-1, 3, 20], count),
    )
    sampled, oracle = host_sample(logits, rows), fused_sampling(logits, rows)
    differs = np.flatnonzero(sampled.tokens != oracle.tokens).tolist()
    assert all(near_edge(logits, rows, row) for row in differs)
    assert len(differs) < 4
    np.testing.assert_array_equal(sampled.top_ids, oracle.top_ids)
    np.testing.assert_allclose(sampled.top_logprobs, oracle.top_logprobs, atol=1e-5, rtol=1e-6)


def test_any_number_of_logprobs_and_of_top_k(make_rows: MakeRows, host_sample: Sample) -> None:
    """Also more than the peaks bound, and more than there are finite logits."""
    size, rng = 3000, np.random.default_rng(3)
    logits = np.round(rng.standard_normal((5, size)) * 8).astype(np.float32)
    logits[:, ::3] = -np.inf
    ks = [1, 47, 700, 2500, size]
    rows = make_rows(5, temperature=1.0, uniforms=0.97, top_k=ks, num_logprobs=[*ks[:4], size + 5])
    sampled, oracle = host_sample(logits, rows), fused_sampling(logits, rows)
    np.testing.assert_array_equal(sampled.tokens, oracle.tokens)
    np.testing.assert_array_equal(sampled.top_ids, oracle.top_ids)
    np.testing.assert_allclose(sampled.top_logprobs, oracle.top_logprobs, atol=1e-5, rtol=0)


def test_counts_are_read_where_they_are_now(make_rows: MakeRows, host_sample: Sample) -> None:
    """In place they change from step to step, and a row that joins brings its own."""
    logits = np.tile(np.arange(40, dtype=np.float32), (3, 1))
    counts = [np.zeros(40, np.int32) for _ in range(4)]
    rows = make_rows(3, presence=100.0, prompt_counts=[None] * 3, output_counts=[counts[0], None, counts[1]])
    assert host_sample(logits, rows).tokens.tolist() == [39, 39, 39]
    counts[1][39] = 1
    assert host_sample(logits, rows).tokens.tolist() == [39, 39, 38]
    counts[3][38:] = 2
    assert host_sample(logits, replace(rows, output_counts=[*counts[1:]])).tokens.tolist() == [38, 39, 37]
    neutral = make_rows(3, output_counts=[counts[3]] * 3)
    assert host_sample(logits, neutral).tokens.tolist() == [39, 39, 39]


def test_a_bias_past_the_vocabulary_is_refused(make_rows: MakeRows, host_sample: Sample) -> None:
    logits = np.zeros((2, 40), np.float32)
    with pytest.raises(DeviceError, match="row 1 biases token 40 of a vocabulary of 40"):
        host_sample(logits, make_rows(2, bias_ids=[[3], [40]], bias_values=[[1], [1]]))
    assert host_sample(logits, make_rows(2, bias_ids=[[3], [39]], bias_values=[[1], [1]])).tokens.tolist() == [3, 39]


def test_a_library_without_the_sampler_is_refused() -> None:
    with pytest.raises(BundleError, match=r"libm\.so\.6 has no sampler: build the bundle again"):
        X86Sampler(ctypes.CDLL("libm.so.6"), 40, 1)

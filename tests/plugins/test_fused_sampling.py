"""FusedSampling: oracle, function body and host kernel agree on mixed rows, and a row stands alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ostinato.plugins.fused_sampling import adjusted_logits, allowed_tokens, fused_sampling, kept_probabilities
from ostinato.plugins.host_sampling import HostSampler
from ostinato.plugins.sampling_rows import Sampled, SamplingRows

Array = NDArray[Any]
Sample = Callable[[Array, SamplingRows], Sampled]
MakeRows = Callable[..., SamplingRows]

EDGE = 1e-6


def mixed_rows(rng: np.random.Generator, make_rows: MakeRows, count: int, size: int) -> tuple[Array, SamplingRows]:
    """Rows of every kind, one in twenty of them in error."""
    logits = (rng.standard_normal((count, size)) * rng.choice([0.3, 1, 4], (count, 1))).astype(np.float32)
    tied = rng.random(count) < 0.3
    logits[tied] = np.round(logits[tied] * 2) / 2
    logits[rng.random((count, size)) < 0.02] = -np.inf
    logits[::40, size // 2] = np.nan
    words = rng.integers(-(2**31), 2**31, (count, -(-size // 32)), np.int32)
    words[rng.random(count) < 0.5] = -1
    words[20::40] = 0
    bias_ids = np.where(rng.random((count, 6)) < 0.5, rng.integers(0, size, (count, 6)), -1)
    bias_ids[:, 5] = bias_ids[:, 4]  # one id twice
    bias_ids[rng.random(count) < 0.5] = -1
    counts = [rng.integers(0, 4, size, np.int32) * (rng.random(size) < 0.2).astype(np.int32) for _ in range(2 * count)]
    return logits, make_rows(
        count,
        uniforms=rng.random(count, np.float32),
        temperature=rng.choice([0, 1e-6, 0.3, 0.8, 1, 2], count),
        top_k=rng.choice([0, 0, -1, 1, 3, 20, size, 10**9], count),
        top_p=rng.choice([0, 0.1, 0.5, 0.9, 0.99, 1, 1], count),
        min_p=rng.choice([0, 0, 0.05, 0.5, 1], count),
        repetition=rng.choice([1, 1.2, 0.8], count),
        presence=rng.choice([0, 0.5, -1], count),
        frequency=rng.choice([0, 0.25, -0.1], count),
        allowed=words,
        bias_ids=bias_ids,
        bias_values=rng.uniform(-10, 10, (count, 6)),
        prompt_counts=[None if i % 3 == 0 else counts[i] for i in range(count)],
        output_counts=[None if i % 4 == 0 else counts[count + i] for i in range(count)],
        num_logprobs=rng.choice([-1, 0, 1, 5, 20], count),
    )


def near_edge(logits: Array, rows: SamplingRows, row: int) -> bool:
    """Whether rounding may decide: a cumulative mass within 1e-6 of p or of the uniform, or a weight of min_p."""
    adjusted = adjusted_logits(logits[row], rows, row)
    assert rows.allowed is not None
    allowed = allowed_tokens(rows.allowed[row], len(adjusted))
    legal = np.sort(adjusted[allowed].astype(np.float64))[::-1]
    if len(legal) == 0 or not np.isfinite(legal[0]) or np.isnan(adjusted).any() or rows.temperature[row] < 1e-5:
        return False
    weights = np.exp((legal - legal[0]) / rows.temperature[row])
    mass = np.cumsum(weights[: rows.top_k[row]] if rows.top_k[row] > 0 else weights)
    drawn = np.cumsum(kept_probabilities(adjusted, allowed, rows, row))
    at_min_p = np.abs(weights - rows.min_p[row]) < EDGE * rows.min_p[row]
    return bool(
        (rows.top_p[row] < 1 and np.abs(mass / mass[-1] - rows.top_p[row]).min() < EDGE)
        or np.abs(drawn[:-1] - rows.uniforms[row]).min() < EDGE
        or (at_min_p & (weights < 1)).any()
    )


@pytest.mark.parametrize("size", [37, 256, 1100])
def test_body_and_host_kernel_agree_with_the_oracle(
    size: int, make_rows: MakeRows, body_sample: Sample, host_sample: Sample
) -> None:
    count = 480
    logits, rows = mixed_rows(np.random.default_rng(size), make_rows, count, size)
    oracle = fused_sampling(logits, rows)
    decided = np.array([not near_edge(logits, rows, row) for row in range(count)])
    assert np.count_nonzero(~decided) < 0.02 * count
    assert 10 < np.count_nonzero(oracle.tokens == -1) < 0.1 * count
    for sampled in (body_sample(logits, rows), host_sample(logits, rows)):
        np.testing.assert_array_equal(sampled.tokens[decided], oracle.tokens[decided])
        asked = decided & (rows.num_logprobs >= 0)
        np.testing.assert_allclose(sampled.logprobs[asked], oracle.logprobs[asked], atol=1e-5, rtol=0)
        for row, k in enumerate(rows.num_logprobs):
            if k > 0:
                np.testing.assert_array_equal(sampled.top_ids[row, :k], oracle.top_ids[row, :k])
                np.testing.assert_allclose(
                    sampled.top_logprobs[row, :k], oracle.top_logprobs[row, :k], atol=1e-5, rtol=0
                )


def test_host_kernel_leaves_what_was_not_asked_for_blank(make_rows: MakeRows, host_sample: Sample) -> None:
    logits, rows = mixed_rows(np.random.default_rng(2), make_rows, 120, 64)
    for sampled in (fused_sampling(logits, rows), host_sample(logits, rows)):
        assert sampled.top_ids.shape == (120, 20)
        for row, k in enumerate(rows.num_logprobs):
            assert np.isnan(sampled.logprobs[row]) == (k < 0)
            assert not np.isnan(sampled.top_logprobs[row, : max(0, k)]).any()
            assert np.isnan(sampled.top_logprobs[row, max(0, k) :]).all()
            assert (sampled.top_ids[row, max(0, k) :] == -1).all()


def test_host_kernel_at_a_real_vocabulary(make_rows: MakeRows, host_sample: Sample) -> None:
    """At 49,152 tokens the float64 mass just before and just after the token encloses the uniform."""
    size, settings = 49_152, [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.95, 0.0), (0, 0.9999, 0.0), (4000, 0.9, 0.01)]
    rng = np.random.default_rng(9)
    logits = (rng.standard_normal((15, size)) * np.repeat([0.5, 1, 3], 5)[:, None]).astype(np.float32)
    top_k, top_p, min_p = (np.tile(column, 3) for column in zip(*settings, strict=True))
    rows = make_rows(
        15,
        uniforms=rng.random(15, np.float32),
        temperature=0.8,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        num_logprobs=20,
    )
    sampled, oracle = host_sample(logits, rows), fused_sampling(logits, rows)
    for row, token in enumerate(sampled.tokens):
        cumulative = np.cumsum(kept_probabilities(logits[row], np.full(size, True), rows, row))
        before = cumulative[token - 1] if token else 0.0
        assert before - EDGE <= rows.uniforms[row] <= cumulative[token] + EDGE
        assert cumulative[token] > before
    np.testing.assert_array_equal(sampled.top_ids, oracle.top_ids)
    np.testing.assert_allclose(sampled.top_logprobs, oracle.top_logprobs, atol=1e-5, rtol=0)


def line_of(rows: SamplingRows, row: int) -> SamplingRows:
    """One row as a batch of its own."""
    return take_rows(rows, slice(row, row + 1))


def take_rows(rows: SamplingRows, which: slice) -> SamplingRows:
    values = {field.name: getattr(rows, field.name) for field in fields(SamplingRows)}
    taken: dict[str, Any] = {name: None if value is None else value[which] for name, value in values.items()}
    return SamplingRows(**taken)


@pytest.mark.parametrize("size", [64, 1503, 5000])
def test_row_alone_equals_row_in_a_batch_bit_for_bit(size: int, make_rows: MakeRows) -> None:
    logits, rows = mixed_rows(np.random.default_rng(1), make_rows, 80, size)
    pooled, lone = HostSampler(size, threads=3), HostSampler(size, threads=1)
    batch = pooled.sample(logits, rows)
    backwards = lone.sample(logits[::-1].copy(), take_rows(rows, slice(None, None, -1)))
    for row in range(80):
        alone = lone.sample(logits[row : row + 1], line_of(rows, row))
        k = max(0, int(rows.num_logprobs[row]))
        for many, at in ((batch, row), (backwards, 79 - row)):
            assert many.tokens[at] == alone.tokens[0]
            assert many.logprobs[at].tobytes() == alone.logprobs[0].tobytes()
            assert many.top_ids[at, :k].tobytes() == alone.top_ids[0].tobytes()
            assert many.top_logprobs[at, :k].tobytes() == alone.top_logprobs[0].tobytes()
    pooled.close()
    lone.close()


def test_host_kernel_leaves_logits_alone(make_rows: MakeRows, host_sample: Sample) -> None:
    logits, rows = mixed_rows(np.random.default_rng(6), make_rows, 40, 128)
    before = logits.copy()
    host_sample(logits, rows)
    np.testing.assert_array_equal(logits, before)


def test_row_without_a_legal_token_is_an_error_of_its_own(
    make_rows: MakeRows, body_sample: Sample, host_sample: Sample
) -> None:
    logits = np.random.default_rng(4).standard_normal((5, 40)).astype(np.float32)
    rows = make_rows(
        5, temperature=[0.8, 0, 0.8, 0.8, 0], allowed=np.full((5, 2), -1, np.int32), uniforms=0.3, num_logprobs=2
    )
    assert rows.allowed is not None
    broken = logits.copy()
    broken[1] = -np.inf
    broken[2, 7] = np.nan
    broken[3, 7] = np.inf
    masks = rows.allowed.copy()
    masks[4] = 0
    for sample in (fused_sampling, body_sample, host_sample):
        good, bad = sample(logits, rows), sample(broken, replace(rows, allowed=masks))
        assert bad.tokens.tolist() == [good.tokens[0], -1, -1, -1, -1]
        assert bad.logprobs[0].tobytes() == good.logprobs[0].tobytes()
        assert (bad.logprobs[1:] == -np.inf).all()
        assert (bad.top_ids[1:] == -1).all()
        assert (bad.top_logprobs[1:] == -np.inf).all()
        assert not np.isnan(bad.top_logprobs).any()


def test_greedy_masked_row_beside_a_sampled_one(make_rows: MakeRows, body_sample: Sample, host_sample: Sample) -> None:
    logits = np.random.default_rng(8).standard_normal((2, 33)).astype(np.float32)
    logits[0, [7, 8]] = [-3, -2.5]
    logits[1, :20] = -np.inf
    rows = make_rows(
        2,
        temperature=[0, 0.8],
        top_p=[1, 0.9],
        uniforms=[0.99, 0.6],
        bias_ids=[[5, -1], [-1, -1]],
        bias_values=[[-100, 0], [0, 0]],
        allowed=[[1 << 7 | 1 << 8, 0], [-1, -1]],
        num_logprobs=0,
    )
    rows = replace(rows, allowed=np.asarray(rows.allowed, np.int32))
    for sample in (fused_sampling, body_sample, host_sample):
        both = sample(logits, rows)
        alone = [sample(logits[row : row + 1], line_of(rows, row)) for row in range(2)]
        assert both.tokens.tolist() == [int(one.tokens[0]) for one in alone]
        assert both.tokens[0] == 8
        assert both.tokens[1] >= 20
        assert np.isfinite(both.logprobs).all()

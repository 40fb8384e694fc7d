"""What each sampling setting means, for the oracle, the function body and the host kernel; and what is drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from ostinato.plugins.fused_sampling import fused_sampling
from ostinato.plugins.philox import uniforms
from ostinato.plugins.sampling_rows import Sampled, SamplingRows

Array = NDArray[Any]
Sample = Callable[[Array, SamplingRows], Sampled]
MakeRows = Callable[..., SamplingRows]

DRAWS = 200_000
STEPS = 24  # bits of a uniform
DIRECT = 2_000


@pytest.fixture(params=["oracle", "body", "host"])
def sample(request: pytest.FixtureRequest, body_sample: Sample, host_sample: Sample) -> Sample:
    return {"oracle": fused_sampling, "body": body_sample, "host": host_sample}[request.param]


def starts_of(sample: Sample, make_rows: MakeRows, logits: Array, **settings: float) -> Array:
    """Where each token begins: the least uniform, in units of 2^-24, that gives it or a later one. By bisection."""
    size = len(logits)
    low, high = np.zeros(size, np.int64), np.full(size, 1 << STEPS)
    tiled = np.tile(logits.astype(np.float32), (size, 1))
    while (low < high).any():
        middle = (low + high) // 2
        at = np.minimum(middle, (1 << STEPS) - 1)
        tokens = sample(tiled, make_rows(size, uniforms=at / (1 << STEPS), **settings)).tokens
        reached = (tokens >= np.arange(size)) | (middle >= 1 << STEPS)
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    return low


def check_distribution(sample: Sample, make_rows: MakeRows, logits: Array, expected: Array, **settings: float) -> None:
    """The exact share of every token, and a chi-square test of 200,000 draws.

    A token is a rising step function of the uniform: its steps come from the kernel, and 2,000 draws go through the
    kernel one by one to show that the function is that.
    """
    starts = starts_of(sample, make_rows, logits, **settings)
    shares = np.diff(np.append(starts, 1 << STEPS)) / (1 << STEPS)
    np.testing.assert_allclose(shares, expected, atol=5e-7)

    count = np.arange(DRAWS, dtype=np.uint32)
    drawn = uniforms(np.full(DRAWS, 7, np.uint64), np.zeros(DRAWS, np.uint32), count)
    tokens = np.searchsorted(starts, drawn.astype(np.float64) * (1 << STEPS), side="right") - 1
    tiled = np.tile(logits.astype(np.float32), (DIRECT, 1))
    direct = sample(tiled, make_rows(DIRECT, uniforms=drawn[:DIRECT], **settings)).tokens
    np.testing.assert_array_equal(direct, tokens[:DIRECT])

    counts, possible = np.bincount(tokens, minlength=len(logits)), expected > 0
    assert counts[~possible].sum() == 0
    if np.count_nonzero(possible) > 1:
        assert stats.chisquare(counts[possible], expected[possible] * DRAWS).pvalue > 0.001
    else:
        assert counts[possible] == DRAWS


def expected_shares(logits: Array, settings: dict[str, float]) -> Array:
    """The definition, token by token, in plain Python."""
    temperature, top_k, top_p, min_p = (
        settings["temperature"],
        int(settings["top_k"]),
        settings["top_p"],
        settings["min_p"],
    )
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature).tolist()
    order = sorted(range(len(weights)), key=lambda token: (-logits[token], token))
    order = order[:top_k] if 0 < top_k < len(order) else order
    total, mass = sum(weights[token] for token in order), 0.0
    kept: list[int] = []
    for token in order:
        if kept and top_p < 1 and mass >= top_p * total:
            break
        mass += weights[token]
        kept.append(token)
    kept = [token for token in kept if weights[token] >= min_p * weights[order[0]]]
    shares = np.zeros(len(weights))
    shares[kept] = [weights[token] for token in kept]
    shares /= shares.sum()
    return shares


@pytest.mark.parametrize("number", range(20))
def test_host_kernel_draws_from_the_defined_distribution(number: int, make_rows: MakeRows, host_sample: Sample) -> None:
    rng = np.random.default_rng(number)
    size = int(rng.integers(16, 65))
    logits = (rng.standard_normal(size) * 2).astype(np.float32)
    settings = {
        "temperature": [0.5, 0.8, 1.0, 1.5][number % 4],
        "top_k": [0, 5, 12, 0, -1][number % 5],
        "top_p": [1.0, 0.9, 0.61][number % 3],
        "min_p": [0.0, 0.0, 0.04][number // 7],
    }
    expected = expected_shares(logits, settings)
    check_distribution(host_sample, make_rows, logits, expected, **settings)


P = np.array([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": -1}, 4),
        ({"top_k": 0}, 4),
        ({"top_k": 1}, 1),
        ({"top_k": 2}, 2),
        ({"top_k": 4}, 4),
        ({"top_k": 10**9}, 4),
        ({"top_p": 0}, 1),
        ({"top_p": 1e-9}, 1),
        ({"top_p": 0.39}, 1),
        ({"top_p": 0.5}, 2),
        ({"top_p": 0.70001}, 3),
        ({"top_p": 1}, 4),
        ({"min_p": 0}, 4),
        ({"min_p": 1}, 1),
        ({"min_p": 0.6}, 2),
        ({"top_k": 3, "top_p": 0.7}, 2),  # of what top-k kept, 0.7 / 0.9 reaches it
        ({"top_k": 3, "top_p": 0.78}, 3),
    ],
    ids=str,
)
def test_truncation_off_edge_and_on(settings: dict[str, float], kept: int, make_rows: MakeRows, sample: Sample) -> None:
    expected = np.where(np.arange(4) < kept, P, 0) / P[:kept].sum()
    check_distribution(sample, make_rows, np.log(P), expected, temperature=1.0, **settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_k": 2}, [0.5, 0.5, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_p": 0.5}, [0.5, 0.5, 0, 0]),
        ({"top_p": 0}, [1, 0, 0, 0]),
        ({"min_p": 1}, [1 / 3, 1 / 3, 1 / 3, 0]),
    ],
    ids=str,
)
def test_ties_go_to_the_lowest_ids(
    settings: dict[str, float], expected: list[float], make_rows: MakeRows, sample: Sample
) -> None:
    logits = np.array([1.0, 1, 1, 0])
    check_distribution(sample, make_rows, logits, np.array(expected), temperature=1.0, **settings)


def test_exact_edges(make_rows: MakeRows, sample: Sample) -> None:
    """Mass that equals p reaches it; a uniform that equals a cumulative share belongs to the next token."""
    even = np.zeros((8, 4), np.float32)
    eighths = np.arange(8) / 8
    half = sample(even, make_rows(8, temperature=1.0, top_p=0.5, uniforms=eighths))
    assert half.tokens.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    whole = sample(even, make_rows(8, temperature=1.0, uniforms=eighths))
    assert whole.tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 5e-324, 0])
@pytest.mark.parametrize("top_p", [1.0, 1e-4])
def test_tiny_temperature_is_argmax(temperature: float, top_p: float, make_rows: MakeRows, sample: Sample) -> None:
    logits = np.array([[2.875, 2.955, 11.06, -2.45]] * 2, np.float16).astype(np.float32)
    for uniform in (0.0, 0.5, 1 - 2**-24):
        rows = make_rows(2, temperature=temperature, top_p=top_p, uniforms=uniform, num_logprobs=2)
        sampled = sample(logits, rows)
        assert sampled.tokens.tolist() == [2, 2]
        assert np.isfinite(sampled.logprobs).all()
        assert np.isfinite(sampled.top_logprobs).all()


def test_greedy_ties_take_the_lowest_id(make_rows: MakeRows, sample: Sample) -> None:
    logits = np.array([[0, 3, 1, 3, 3]], np.float32)
    assert sample(logits, make_rows(1, uniforms=0.9)).tokens.tolist() == [1]


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 2}, {"top_p": 0.5}, {"top_k": 1}], ids=str)
def test_logprobs_are_of_the_model_not_of_the_draw(
    settings: dict[str, float], make_rows: MakeRows, sample: Sample
) -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    sampled = sample(logits, make_rows(1, **({"temperature": 1.0} | settings), uniforms=0.1, num_logprobs=3))
    np.testing.assert_allclose(sampled.top_logprobs, [[-0.6931, -1.2040, -1.6094]], atol=5e-5)
    assert sampled.top_ids.tolist() == [[0, 1, 2]]
    assert sampled.logprobs[0] == sampled.top_logprobs[0, 0]


def test_logprobs_do_not_depend_on_k(make_rows: MakeRows, sample: Sample) -> None:
    rng = np.random.default_rng(3)
    logits = np.round(rng.standard_normal((8, 300)) * 4).astype(np.float32) / 2  # many ties
    settings = {"temperature": 1.0, "uniforms": rng.random(8, np.float32)}
    widest = sample(logits, make_rows(8, **settings, num_logprobs=20))
    for k in range(20):
        narrow = sample(logits, make_rows(8, **settings, num_logprobs=k))
        assert narrow.top_ids.tobytes() == widest.top_ids[:, :k].tobytes()
        assert narrow.top_logprobs.tobytes() == widest.top_logprobs[:, :k].tobytes()
        assert narrow.logprobs.tobytes() == widest.logprobs.tobytes()
    for row in range(8):
        ids, logprobs = widest.top_ids[row].tolist(), widest.top_logprobs[row].tolist()
        ranked = sorted((-float(logit), token) for token, logit in enumerate(logits[row]))
        assert ids == [token for _, token in ranked[:20]]
        assert logprobs == sorted(logprobs, reverse=True)
        if (token := widest.tokens[row]) in ids:
            assert logprobs[ids.index(token)] == widest.logprobs[row]


def test_chosen_token_has_its_entrys_logprob_at_every_rank(make_rows: MakeRows, sample: Sample) -> None:
    logits = np.random.default_rng(5).standard_normal((20, 20)).astype(np.float32)
    order = np.argsort(-logits, axis=1)
    forced = np.array([[1 << order[row, row]] for row in range(20)], np.int32)  # row r must take its r-th best
    sampled = sample(logits, make_rows(20, allowed=forced, num_logprobs=20))
    for rank in range(20):
        assert sampled.tokens[rank] == sampled.top_ids[rank, rank]
        assert sampled.logprobs[rank] == sampled.top_logprobs[rank, rank]


def test_bias_and_penalties_by_hand(make_rows: MakeRows, sample: Sample) -> None:
    logits = np.array([[2, -2, 1, 0, 0.5]], np.float32)
    rows = make_rows(
        1,
        repetition=2,
        presence=0.5,
        frequency=0.25,
        bias_ids=[[3, -1, 3]],
        bias_values=[[1, 50, 0.5]],
        prompt_counts=[np.array([1, 1, 0, 0, 0], np.int32)],
        output_counts=[np.array([0, 0, 3, 1, 0], np.int32)],
        num_logprobs=5,
    )
    adjusted = np.array([1, -4, 0.5 - 0.5 - 0.75, 0.75 - 0.5 - 0.25, 0.5])
    expected = adjusted - np.log(np.exp(adjusted).sum())
    sampled = sample(logits, rows)
    assert sampled.top_ids.tolist() == [[0, 4, 3, 2, 1]]
    np.testing.assert_allclose(sampled.top_logprobs[0], expected[[0, 4, 3, 2, 1]], atol=1e-6)

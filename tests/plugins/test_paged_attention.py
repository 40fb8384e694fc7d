"""PagedAttention: the body under ONNX Runtime equals the oracle, and the oracle equals plain dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ostinato.plugins.paged_attention import (
    PAGED_ATTENTION,
    AttentionAttributes,
    AttentionInputs,
    AttentionOutputs,
    paged_attention,
)
from ostinato.plugins.paged_attention_onnx import paged_attention_function

BLOCK = 4
POOL = 24
Array = NDArray[Any]
RunBody = Callable[[AttentionInputs, AttentionAttributes], AttentionOutputs]

HEADS = ((2, 2, 8), (3, 1, 16), (8, 1, 4), (9, 3, 8))  # GQA ratios 1, 3, 8 and 3 over several KV heads
VARIANTS = tuple(
    AttentionAttributes(q, kv, size, size**-0.5, window, cap)
    for q, kv, size in HEADS
    for window, cap in ((0, 0.0), (3, 0.0), (0, 2.0), (5, 0.7))
)


def make_inputs(seed: int, rows: list[tuple[int, int]], pads: int, a: AttentionAttributes) -> AttentionInputs:
    """A step of `rows` (tokens cached, tokens new), its blocks shuffled over the pool, and `pads` after it.

    Slots that nobody may read hold NaN.
    """
    rng = np.random.default_rng(seed)
    shape = (POOL, a.num_kv_heads, BLOCK, a.head_size)
    caches = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    widths = [-(-(cached + new) // BLOCK) for cached, new in rows]
    tables = np.zeros((len(rows) + pads, max(widths) + 1), np.int32)
    free = rng.permutation(np.arange(1, POOL))
    slots: list[int] = []
    for row, (cached, new) in enumerate(rows):
        tables[row, : widths[row]], free = free[: widths[row]], free[widths[row] :]
        at = np.arange(cached + new)
        slots += (tables[row, at // BLOCK] * BLOCK + at % BLOCK)[cached:].tolist()
        for cache in caches:
            for j in range(cached):
                cache[tables[row, j // BLOCK], :, j % BLOCK] = rng.standard_normal((a.num_kv_heads, a.head_size))
    lengths = [new for _, new in rows] + [1] * pads
    kv_width = a.num_kv_heads * a.head_size
    return AttentionInputs(
        q=rng.standard_normal((sum(lengths), a.num_q_heads * a.head_size)).astype(np.float32) * 2,
        k=rng.standard_normal((sum(lengths), kv_width)).astype(np.float32),
        v=rng.standard_normal((sum(lengths), kv_width)).astype(np.float32),
        key_cache=caches[0],
        value_cache=caches[1],
        slot_mapping=np.array(slots + [0] * pads, np.int32),
        query_starts=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=np.array([cached for cached, _ in rows] + [0] * pads, np.int32),
        block_tables=tables,
    )


@pytest.fixture(scope="session")
def run_body(make_run: Any) -> RunBody:
    runs: dict[AttentionAttributes, Any] = {}

    def run(inputs: AttentionInputs, a: AttentionAttributes) -> AttentionOutputs:
        feeds = {name: getattr(inputs, name) for name in PAGED_ATTENTION.inputs}
        if a not in runs:
            attributes = {attribute.name: getattr(a, attribute.name) for attribute in PAGED_ATTENTION.attributes}
            runs[a] = make_run(PAGED_ATTENTION, paged_attention_function(), feeds, **attributes)
        return AttentionOutputs(**runs[a](feeds))

    return run


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], int]:
    """A seed, 1 to 4 rows of 1 to 3 blocks, decode rows and chunks together, and pads."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        total = draw(st.integers(1, 3 * BLOCK))
        new = draw(st.one_of(st.just(1), st.integers(1, total)))
        rows.append((total - new, new))
    return draw(st.integers(0, 2**32 - 1)), rows, draw(st.integers(0, 3))


@settings(max_examples=80, deadline=None, derandomize=True, phases=[Phase.generate, Phase.shrink])
@given(step=steps(), attributes=st.sampled_from(VARIANTS))
def test_body_equals_oracle(
    run_body: RunBody, step: tuple[int, list[tuple[int, int]], int], attributes: AttentionAttributes
) -> None:
    seed, rows, pads = step
    inputs = make_inputs(seed, rows, pads, attributes)
    body, oracle = run_body(inputs, attributes), paged_attention(inputs, attributes)
    live = inputs.query_starts[len(rows)]
    np.testing.assert_allclose(body.out[:live], oracle.out[:live], atol=2e-5)
    assert np.isfinite(body.out).all()  # pads share slot 0: whose key they meet there is open, but it is a number
    for name in ("key_cache_out", "value_cache_out"):
        np.testing.assert_array_equal(getattr(body, name)[1:], getattr(oracle, name)[1:])


@pytest.mark.parametrize("attributes", VARIANTS, ids=str)
def test_oracle_equals_dense_attention(attributes: AttentionAttributes) -> None:
    a = attributes
    rows = [(7, 1), (0, 9), (5, 4)]
    inputs = make_inputs(5, rows, 0, a)
    out = paged_attention(inputs, a).out
    for row, (cached, new) in enumerate(rows):
        start = inputs.query_starts[row]
        step = slice(start, start + new)
        blocks = inputs.block_tables[row]

        def dense(cache: Array, fresh: Array, blocks: Array = blocks, cached: int = cached) -> Array:
            """[Hkv, length, D]: the row's blocks laid end to end, then this step's tokens."""
            before = np.concatenate(list(cache[blocks]), axis=1)[:, :cached]
            after = fresh.reshape(-1, a.num_kv_heads, a.head_size).swapaxes(0, 1)
            joined = np.concatenate([before, after], axis=1)
            return np.repeat(joined, a.num_q_heads // a.num_kv_heads, axis=0)

        k, v = dense(inputs.key_cache, inputs.k[step]), dense(inputs.value_cache, inputs.v[step])
        q = inputs.q[step].reshape(new, a.num_q_heads, a.head_size).swapaxes(0, 1)
        scores = np.einsum("hid,hjd->hij", q, k) * a.scale
        if a.logit_softcap:
            scores = np.tanh(scores / a.logit_softcap) * a.logit_softcap
        i, j = np.arange(cached, cached + new)[:, None], np.arange(cached + new)
        visible = (j <= i) & ((j > i - a.sliding_window) if a.sliding_window else True)
        weights = np.where(visible, np.exp(scores), 0)
        expected = np.einsum("hij,hjd->ihd", weights / weights.sum(axis=-1, keepdims=True), v)
        np.testing.assert_allclose(out[step], expected.reshape(new, -1), atol=1e-5)


def test_pads_touch_only_the_null_block(run_body: RunBody) -> None:
    attributes = VARIANTS[0]
    inputs = make_inputs(3, [(2, 1)], 3, attributes)
    pads = AttentionInputs(
        q=inputs.q[1:],
        k=inputs.k[1:],
        v=inputs.v[1:],
        key_cache=np.nan_to_num(inputs.key_cache, nan=9.0),
        value_cache=np.nan_to_num(inputs.value_cache, nan=9.0),
        slot_mapping=np.array([0, 0, 3], np.int32),
        query_starts=np.arange(4, dtype=np.int32),
        context_lens=np.zeros(3, np.int32),
        block_tables=np.zeros((3, 2), np.int32),
    )
    result = run_body(pads, attributes)
    assert np.isfinite(result.out).all()
    for before, after in ((pads.key_cache, result.key_cache_out), (pads.value_cache, result.value_cache_out)):
        np.testing.assert_array_equal(before[1:], after[1:])
        assert (before[0] != after[0]).any()


def test_token_that_no_row_owns_comes_out_zero(run_body: RunBody) -> None:
    attributes = VARIANTS[1]
    inputs = make_inputs(4, [(3, 1), (0, 5)], 1, attributes)
    unowned = AttentionInputs(
        **{name: getattr(inputs, name) for name in ("q", "k", "v", "key_cache", "value_cache", "slot_mapping")},
        query_starts=inputs.query_starts[:-1],
        context_lens=inputs.context_lens[:-1],
        block_tables=inputs.block_tables[:-1],
    )
    for result in (run_body(unowned, attributes), paged_attention(unowned, attributes)):
        assert (result.out[-1] == 0).all()
        assert np.isfinite(result.out).all()


def test_half_precision_cache_keeps_its_type(make_run: Any) -> None:
    a = VARIANTS[0]
    inputs = make_inputs(8, [(5, 1), (0, 6)], 0, a)
    feeds = {name: getattr(inputs, name) for name in PAGED_ATTENTION.inputs}
    feeds |= {name: feeds[name].astype(np.float16) for name in ("key_cache", "value_cache")}
    required = {"num_q_heads": a.num_q_heads, "num_kv_heads": a.num_kv_heads, "head_size": a.head_size}
    result = make_run(PAGED_ATTENTION, paged_attention_function(), feeds, scale=a.scale, **required)(feeds)
    assert result["key_cache_out"].dtype == np.float16
    np.testing.assert_allclose(result["out"], paged_attention(AttentionInputs(**feeds), a).out, atol=1e-4)

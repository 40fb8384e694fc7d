"""PagedAttention's kernels in the interpreter: equal to the oracle, deaf to neighbours and to poison, compilable."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ostinato.engines.errors import RecipeError
from ostinato.engines.io_table import QUANTIZED_CACHES
from ostinato.engines.program import StepShape
from ostinato.plugins.cache_codes import dequantize, split_cache
from ostinato.plugins.cache_write import write_cache
from ostinato.plugins.operator_shapes import AttentionShape
from ostinato.plugins.paged_attention import AttentionAttributes, AttentionInputs
from ostinato.plugins.paged_attention_launch import (
    Tiling,
    paged_attention_launches,
    paged_attention_scratch,
    tiling,
    used_splits,
)
from tests.attention_steps import Row, bits, expected_out, lay_out, make_row, run_kernels
from tests.interpreter import compiled_form, run_launches, scratch_arrays
from tests.scale import scaled

Array = NDArray[Any]
SMALL = Tiling(  # tiles that short rows cross
    max_splits=4, min_split=16, decode_keys=16, decode_stages=1, prefill_lines=16, prefill_keys=16, prefill_warps=1,
    prefill_stages=1,
)  # fmt: skip
HEADS = ((2, 2), (3, 1), (8, 2), (8, 1), (20, 1))
DTYPES = (
    ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "int8"),
    ("float16", "float8_e4m3"), ("bfloat16", "int8"), ("bfloat16", "float8_e4m3"), ("float32", "int8"),
)  # fmt: skip
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}  # of the largest number
BLOCKS = 40


def random_shape(rng: np.random.Generator, dtypes: tuple[str, str]) -> AttentionShape:
    q_heads, kv_heads = HEADS[rng.integers(len(HEADS))]
    size = int(rng.choice([32, 64, 80, 128]))
    window, softcap = int(rng.choice([0, 0, 1, 7, 20])), float(rng.choice([0.0, 0.0, 0.7, 5.0]))
    attributes = AttentionAttributes(q_heads, kv_heads, size, size**-0.5, window, softcap)
    block = int(rng.choice([4, 6, 16, 32]))
    return AttentionShape(attributes, *dtypes, block_size=block, table_width=-(-96 // block), max_rows=4)


def random_rows(rng: np.random.Generator, shape: AttentionShape, phase: str) -> list[Row]:
    """1 to 3 rows of up to 90 tokens; in a prefill step some have one new token, some up to 16."""
    rows = []
    spread = float(rng.choice([1, 2**-10]))  # small values: weights times scales would leave float16's range
    for _ in range(rng.integers(1, 4)):
        new = 1 if phase == "decode" or rng.random() < 0.3 else int(rng.integers(1, 17))
        rows.append(make_row(rng, shape, int(rng.integers(0, rng.choice([1, 12, 66]))), new, spread))
    return rows


def random_step(rng: np.random.Generator, rows: list[Row], phase: str) -> StepShape:
    pads = int(rng.integers(0, 4))
    if phase == "decode":
        return StepShape("decode", len(rows) + pads, len(rows) + pads)
    return StepShape("prefill", sum(len(row.q) for row in rows) + pads, len(rows) + int(rng.integers(0, 3)))


@pytest.mark.parametrize("dtypes", DTYPES, ids="/".join)
@pytest.mark.parametrize("seed", range(scaled(4, 10)))
def test_kernels_equal_oracle(seed: int, dtypes: tuple[str, str]) -> None:
    """Four steps each; pads, foreign slots and unused table entries are poison in all of them."""
    rng = np.random.default_rng([seed, *map(ord, "".join(dtypes))])
    for phase in ("decode", "decode", "prefill", "prefill"):
        shape = random_shape(rng, dtypes)
        rows = random_rows(rng, shape, phase)
        step = random_step(rng, rows, phase)
        blocks = 1 + 3 * shape.table_width
        inputs = lay_out(rng, shape, step, rows, blocks)
        written = replace(inputs, key_cache=inputs.key_cache.copy(), value_cache=inputs.value_cache.copy())
        with np.errstate(invalid="ignore"):
            write_cache(written, shape.block_size, shape.cache_dtype)
        answer = run_kernels(shape, step, inputs, SMALL)

        expected = expected_out(shape, rows)
        error = np.abs(answer.out.astype(np.float32) - expected).max()
        assert error <= TOLERANCE[shape.dtype] * np.abs(expected).max(), shape
        assert (answer.pads == 0).all()
        assert answer.guarded
        for name in ("key_cache", "value_cache"):
            np.testing.assert_array_equal(bits(getattr(answer, name)[1:]), bits(getattr(written, name)[1:]))


@pytest.mark.parametrize("dtypes", DTYPES[1:5], ids="/".join)
def test_pads_write_their_place_in_the_null_block(dtypes: tuple[str, str]) -> None:
    rng = np.random.default_rng(7)
    attributes = AttentionAttributes(8, 2, 64, 0.125)
    shape = AttentionShape(attributes, *dtypes, block_size=4, table_width=24, max_rows=4)
    inputs = lay_out(rng, shape, StepShape("decode", 3, 3), [make_row(rng, shape, 5, 1)], BLOCKS)
    before = [bits(cache).copy() for cache in (inputs.key_cache, inputs.value_cache)]
    inputs.k[1:], inputs.v[1:] = 3, 3  # pads 1 and 2, offsets 1 and 2 of block 0
    answer = run_kernels(shape, StepShape("decode", 3, 3), inputs, SMALL)
    for old, cache in zip(before, (answer.key_cache, answer.value_cache), strict=True):
        changed = np.flatnonzero((bits(cache) != old).reshape(BLOCKS, -1).any(axis=1))
        assert changed.tolist() == [0, int(inputs.slot_mapping[0]) // 4]
        if shape.cache_dtype in QUANTIZED_CACHES:
            codes, scales = split_cache(cache, 4)
            null = dequantize(codes[0, :, 1:3], scales[0, :, 1:3], shape.cache_dtype)
        else:
            null = cache[0, :, 1:3]
        np.testing.assert_allclose(null.astype(np.float32), 3, rtol=1e-6)


@pytest.mark.parametrize("dtypes", [DTYPES[i] for i in (0, 1, 2, 3, 6)], ids="/".join)
def test_a_row_is_the_same_alone_and_in_company(dtypes: tuple[str, str]) -> None:
    """Other neighbours, other blocks, other buckets, another place; one-token rows in a prefill step too."""
    rng = np.random.default_rng(11)
    window, softcap = (19, 0.7) if dtypes[1] in QUANTIZED_CACHES else (0, 0.0)
    attributes = AttentionAttributes(3, 1, 80, 80**-0.5, window, softcap)
    shape = AttentionShape(attributes, *dtypes, block_size=16, table_width=6, max_rows=5)
    one, many = make_row(rng, shape, 70, 1), make_row(rng, shape, 31, 9)
    others = [make_row(rng, shape, cached, new) for cached, new in ((3, 1), (40, 1), (0, 7), (50, 4))]

    def outs(step: StepShape, rows: list[Row], which: Row) -> Array:
        start = sum(len(row.q) for row in rows[: next(i for i, row in enumerate(rows) if row is which)])
        answer = run_kernels(shape, step, lay_out(rng, shape, step, rows, BLOCKS), SMALL)
        return bits(answer.out[start : start + len(which.q)])

    alone = outs(StepShape("decode", 1, 1), [one], one)
    for step, rows in (
        (StepShape("decode", 4, 4), [others[1], one, others[0]]),
        (StepShape("prefill", 14, 3), [others[2], one, others[3]]),
        (StepShape("prefill", 18, 5), [others[0], many, one]),
    ):
        np.testing.assert_array_equal(outs(step, rows, one), alone)
    alone = outs(StepShape("prefill", 9, 1), [many], many)
    for step, rows in (
        (StepShape("prefill", 20, 4), [others[2], others[0], many]),
        (StepShape("prefill", 14, 3), [others[3], many, one]),
    ):
        np.testing.assert_array_equal(outs(step, rows, many), alone)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (0, 50.0), (1, 0.0), (33, 1e6), (1000, 1e-3)])
def test_contexts_at_the_borders_of_splits_tiles_and_blocks(window: int, softcap: float) -> None:
    """One key short of a border, on it and past it, in splits of 16 and, where three do not reach, longer ones."""
    rng = np.random.default_rng(13)
    attributes = AttentionAttributes(7, 1, 48, 48**-0.5, window, softcap)
    shape = AttentionShape(attributes, "float32", "float32", block_size=8, table_width=12, max_rows=4)
    tiles = replace(SMALL, max_splits=3)
    for step, lengths in (
        (StepShape("decode", 12, 12), [(cached, 1) for cached in (0, 14, 15, 16, 31, 32, 47, 48, 49, 94, 95)]),
        (StepShape("prefill", 70, 6), [(0, 17), (15, 2), (16, 16), (31, 1), (4, 28)]),
    ):
        rows = [make_row(rng, shape, cached, new) for cached, new in lengths]
        answer = run_kernels(shape, step, lay_out(rng, shape, step, rows, 200), tiles)
        expected = expected_out(shape, rows)
        assert np.abs(answer.out - expected).max() <= 1e-5 * np.abs(expected).max()
        assert answer.guarded


def test_a_short_row_is_split_though_the_context_may_be_long() -> None:
    """As many splits as it has keys for, each its own program: one short row must keep a GPU busy too."""
    rng = np.random.default_rng(14)
    shape = AttentionShape(AttentionAttributes(2, 1, 16, 0.25), "float32", "float32", 16, table_width=512, max_rows=2)
    step, contexts = StepShape("decode", 2, 2), (79, 9)
    inputs = lay_out(rng, shape, step, [make_row(rng, shape, cached, 1) for cached in contexts], 520)
    tensors = vars_of(inputs) | scratch_arrays(paged_attention_scratch(shape, [step], SMALL))
    run_launches(paged_attention_launches(shape, step, SMALL)[:2], tensors | {"out": inputs.q.copy()})
    written = np.isfinite(tensors["split_weight"]).sum(axis=2)
    assert written.tolist() == [[3, 3], [1, 1]]
    assert [used_splits(shape, context, SMALL) for context in contexts] == [3, 1]
    long = replace(shape, table_width=8192)
    assert [used_splits(long, context) for context in (255, 8191, 16383, 131071)] == [1, 32, 64, 64]
    windowed = replace(long, attributes=replace(long.attributes, sliding_window=4096))
    assert [used_splits(windowed, context) for context in (255, 8191, 131070)] == [1, 16, 17]


def test_programs_that_share_the_splits_of_a_row_give_the_same_bits() -> None:
    """In a step of many rows a program takes several splits, in turn."""
    rng = np.random.default_rng(16)
    attributes = AttentionAttributes(2, 1, 16, 0.25)
    shape = AttentionShape(attributes, "float32", "float32", block_size=16, table_width=8, max_rows=9)
    step = StepShape("decode", 2, 2)
    rows = [make_row(rng, shape, cached, 1) for cached in (110, 20)]
    outs = []
    for abreast in (4, 3, 1):
        inputs = lay_out(np.random.default_rng(1), shape, step, rows, BLOCKS)
        tensors = vars_of(inputs) | scratch_arrays(paged_attention_scratch(shape, [step], SMALL))
        write, splits, join = paged_attention_launches(shape, step, SMALL)
        assert splits.grid == (2, 1, 4)
        out = np.zeros_like(inputs.q)
        run_launches((write, replace(splits, grid=(2, 1, abreast)), join), tensors | {"out": out})
        outs.append(out)
    assert outs[0].any()
    assert outs[0].tobytes() == outs[1].tobytes() == outs[2].tobytes()
    long = replace(shape, attributes=replace(attributes, num_kv_heads=8, num_q_heads=64), table_width=8192)
    grids = [paged_attention_launches(long, StepShape("decode", n, n))[1].grid for n in (1, 16, 64, 2048)]
    assert grids == [(1, 8, 64), (16, 8, 64), (64, 8, 16), (2048, 8, 1)]


def vars_of(inputs: AttentionInputs) -> dict[str, Array]:
    return {field.name: getattr(inputs, field.name) for field in fields(inputs)}


@pytest.mark.parametrize("bad", [np.inf, np.nan, 3e38])
@pytest.mark.parametrize("dtypes", [DTYPES[i] for i in (2, 5)], ids="/".join)
def test_what_is_not_finite_stays_in_its_row(dtypes: tuple[str, str], bad: float) -> None:
    """Other rows keep their bits, and the row itself is not given out as numbers, but for a key of no weight at all."""
    rng = np.random.default_rng(15)
    shape = AttentionShape(AttentionAttributes(2, 1, 16, 0.2), *dtypes, block_size=16, table_width=6, max_rows=4)
    step = StepShape("prefill", 9, 3)
    rows = [make_row(rng, shape, cached, new) for cached, new in ((20, 1), (35, 1), (3, 6))]
    clean = run_kernels(shape, step, lay_out(np.random.default_rng(1), shape, step, rows, BLOCKS), SMALL)
    for name, token, mine in (("k", 1, [1]), ("v", 1, [1]), ("v", 4, range(2, 8))):
        inputs = lay_out(np.random.default_rng(1), shape, step, rows, BLOCKS)
        getattr(inputs, name)[token, 5] = bad
        answer = run_kernels(shape, step, inputs, SMALL)
        others = [token for token in range(8) if token not in mine]
        np.testing.assert_array_equal(bits(answer.out[others]), bits(clean.out[others]))
        if np.isnan(bad) or (np.isinf(bad) and name == "v"):
            assert not np.isfinite(answer.out[token].astype(np.float32)).all(), f"a {bad} in {name} passes for a number"


def test_shapes_that_kernels_can_not_count_or_align_are_refused() -> None:
    shape = AttentionShape(AttentionAttributes(64, 8, 128, 0.1), "float16", "float16", 16, 512, 256)
    with pytest.raises(RecipeError, match=r"262144 tokens.*lower limits\.max_step_tokens"):
        paged_attention_launches(shape, StepShape("prefill", 262_144, 256))
    odd = AttentionShape(AttentionAttributes(2, 2, 18, 0.1), "float16", "int8", 3, 512, 256)
    with pytest.raises(RecipeError, match=r"limits\.block_size that 4 divides"):
        paged_attention_launches(odd, StepShape("decode", 2, 2))
    assert paged_attention_launches(replace(odd, block_size=4), StepShape("decode", 2, 2))


def test_kernels_and_tiles_do_not_depend_on_the_bucket() -> None:
    """What a row's numbers follow from is compiled once; only grids differ."""
    attributes = AttentionAttributes(9, 3, 64, 0.125)
    shape = AttentionShape(attributes, "float16", "float16", block_size=32, table_width=64, max_rows=32)
    decode = [paged_attention_launches(shape, StepShape("decode", n, n)) for n in (1, 8, 32)]
    prefill = [paged_attention_launches(shape, StepShape("prefill", t, 32)) for t in (64, 512)]
    assert len({launch.kernel for launches in decode for launch in launches}) == 3
    assert len({launch.kernel for launches in prefill for launch in launches}) == 4
    assert [launch.kernel for launch in decode[0][1:]] == [launch.kernel for launch in prefill[0][1:3]]
    assert [launch.grid for launch in decode[1]] == [(8, 1, 1), (8, 3, 8), (8, 9, 1)]
    assert prefill[1][3].grid == (512 // 21 + 32, 3, 1)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("bfloat16", "float8_e4m3")], ids="/".join)
def test_kernels_compile_ahead_of_time(capability: int, dtypes: tuple[str, str]) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32", "uint8": "*u8"}
    attributes = AttentionAttributes(8, 2, 64, 0.125, 128, 30.0)
    shape = AttentionShape(attributes, *dtypes, block_size=16, table_width=32, max_rows=16)
    assert tiling(shape).min_split == 256
    for launch in paged_attention_launches(shape, StepShape("prefill", 128, 16)):
        spec = launch.kernel
        signature = {p.name: kinds[p.dtype] for p in spec.pointers} | {name: "constexpr" for name, _ in spec.constants}
        aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(spec.pointers))}
        source = ASTSource(compiled_form(spec), signature, dict(spec.constants), aligned)
        options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True}
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert kernel.asm["cubin"][:4] == b"\x7fELF"

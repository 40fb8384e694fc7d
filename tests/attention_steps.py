"""Steps for PagedAttention's kernels: rows with a history, laid out over shuffled blocks beside poison (in tests)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ostinato.engines.io_table import QUANTIZED_CACHES, device_cache_shape
from ostinato.engines.program import StepShape
from ostinato.plugins.cache_codes import dequantize, quantize, split_cache
from ostinato.plugins.operator_shapes import AttentionShape
from ostinato.plugins.paged_attention import AttentionInputs, paged_attention
from ostinato.plugins.paged_attention_launch import Tiling, paged_attention_launches, paged_attention_scratch
from tests.interpreter import run_launches, scratch_arrays

Array = NDArray[Any]
GUARD = 4096  # bytes before and after what kernels write, that nobody may touch
GUARD_BYTE = 0xA5


@dataclass(frozen=True)
class Row:
    """One request: keys and values of all its tokens [length, Hkv, D], queries [new, Hq, D] of the last ones."""

    k: Array
    v: Array
    q: Array

    @property
    def cached(self) -> int:
        return len(self.k) - len(self.q)


@dataclass(frozen=True)
class Answer:
    """`out` [live tokens, Hq*D], `pads` the rest; caches as left behind; `guards` whether all stayed as they were."""

    out: Array
    pads: Array
    key_cache: Array
    value_cache: Array
    guarded: bool


def as_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def make_row(rng: np.random.Generator, shape: AttentionShape, cached: int, new: int, spread: float = 1.0) -> Row:
    """A random row; `spread`: of its values."""
    a, dtype = shape.attributes, as_dtype(shape.dtype)
    size = (cached + new, a.num_kv_heads, a.head_size)
    k, v = (rng.standard_normal(size) for _ in range(2))
    k, v = k.astype(dtype), (v * spread).astype(dtype)
    return Row(k, v, (rng.standard_normal((new, a.num_q_heads, a.head_size)) * 2).astype(dtype))


def lay_out(
    rng: np.random.Generator, shape: AttentionShape, step: StepShape, rows: Sequence[Row], blocks: int
) -> AttentionInputs:
    """The step's arrays. Pads, what no row owns, and table entries past a row's blocks are poison."""
    a, dtype = shape.attributes, as_dtype(shape.dtype)
    quantized = shape.cache_dtype in QUANTIZED_CACHES
    per_block = device_cache_shape(shape.cache_dtype, a.num_kv_heads, shape.block_size, a.head_size)[1:]
    cache_shape = [blocks, *(dim for dim in per_block if isinstance(dim, int))]
    caches = [guarded(cache_shape, np.dtype(np.uint8) if quantized else dtype) for _ in range(2)]
    starts = np.cumsum([0, *(len(row.q) for row in rows)])
    poison = rng.choice([2**31 - 1, -1])
    slot_mapping = np.full(step.tokens, poison, np.int32)
    query_starts = np.full(step.rows + 1, starts[-1], np.int32)
    query_starts[: len(starts)] = starts
    context_lens = np.full(step.rows, poison, np.int32)
    tables = np.full((step.rows, shape.table_width), poison, np.int32)
    new: dict[str, Array] = {
        name: np.full((step.tokens, heads * a.head_size), np.nan, dtype)
        for name, heads in (("q", a.num_q_heads), ("k", a.num_kv_heads), ("v", a.num_kv_heads))
    }
    free = iter(rng.permutation(np.arange(1, blocks)))
    for index, row in enumerate(rows):
        at = np.arange(len(row.k))
        mine = np.array([next(free) for _ in range(-(-len(at) // shape.block_size))])
        slots = mine[at // shape.block_size] * shape.block_size + at % shape.block_size
        span = slice(starts[index], starts[index + 1])
        tables[index, : len(mine)] = mine
        context_lens[index] = row.cached
        slot_mapping[span] = slots[row.cached :]
        for name, numbers in (("q", row.q), ("k", row.k[row.cached :]), ("v", row.v[row.cached :])):
            new[name][span] = numbers.reshape(len(row.q), -1)
        for cache, numbers in zip(caches, (row.k, row.v), strict=True):
            _fill(shape, cache, slots[: row.cached], numbers[: row.cached])
    return AttentionInputs(**new, key_cache=caches[0], value_cache=caches[1], slot_mapping=slot_mapping,
                           query_starts=query_starts, context_lens=context_lens, block_tables=tables)  # fmt: skip


def run_kernels(shape: AttentionShape, step: StepShape, inputs: AttentionInputs, tiles: Tiling) -> Answer:
    """The launches of the step in the interpreter; the inputs' caches change in place."""
    out = guarded(inputs.q.shape, inputs.q.dtype)
    tensors = {name: getattr(inputs, name) for name in AttentionInputs.__dataclass_fields__} | {"out": out}
    tensors |= scratch_arrays(paged_attention_scratch(shape, (step,), tiles))
    run_launches(paged_attention_launches(shape, step, tiles), tensors)
    live = int(inputs.query_starts[-1])
    whole = all(_guards_hold(array) for array in (out, inputs.key_cache, inputs.value_cache))
    return Answer(out[:live], out[live:], inputs.key_cache, inputs.value_cache, whole)


def expected_out(shape: AttentionShape, rows: Sequence[Row]) -> Array:
    """What the operator's oracle gives for the rows, on caches of float32 that hold what attention reads."""
    outs = []
    for row in rows:
        k, v = (_as_read(shape, numbers) for numbers in (row.k, row.v))
        caches = [np.zeros((1 + -(-len(k) // shape.block_size), *k.shape[1:]), np.float32) for _ in range(2)]
        caches = [np.repeat(cache[:, :, None], shape.block_size, axis=2) for cache in caches]
        table = np.arange(1, len(caches[0]), dtype=np.int32)
        at = np.arange(len(k))
        slots = table[at // shape.block_size] * shape.block_size + at % shape.block_size
        for cache, numbers in zip(caches, (k, v), strict=True):
            cache[slots // shape.block_size, :, slots % shape.block_size] = numbers
        new = slice(row.cached, None)
        q, k, v = (array.astype(np.float32).reshape(len(row.q), -1) for array in (row.q, k[new], v[new]))
        starts, context = np.array([0, len(row.q)], np.int32), np.array([row.cached], np.int32)
        inputs = AttentionInputs(
            q, k, v, caches[0], caches[1], slots[new].astype(np.int32), starts, context, table[None]
        )
        outs.append(paged_attention(inputs, shape.attributes).out)
    return np.concatenate(outs)


def bits(array: Array) -> Array:
    """Bytes, so that NaN equals itself."""
    return np.ascontiguousarray(array).view(np.uint8)


def guarded(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """An array of NaN (or 0xFF) inside a larger one that nobody may write to."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.full(size + 2 * GUARD, GUARD_BYTE, np.uint8)
    memory[GUARD : GUARD + size] = 0xFF
    return memory[GUARD : GUARD + size].view(dtype).reshape(shape)


def _guards_hold(array: Array) -> bool:
    memory = array
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return bool((memory[:GUARD] == GUARD_BYTE).all() and (memory[-GUARD:] == GUARD_BYTE).all())


def _fill(shape: AttentionShape, cache: Array, slots: Array, numbers: Array) -> None:
    block, offset = slots // shape.block_size, slots % shape.block_size
    if cache.dtype == np.uint8:
        codes, scales = split_cache(cache, shape.block_size)
        codes[block, :, offset], scales[block, :, offset] = quantize(numbers, shape.cache_dtype)
    else:
        cache[block, :, offset] = numbers


def _as_read(shape: AttentionShape, numbers: Array) -> Array:
    if shape.cache_dtype in QUANTIZED_CACHES:
        return dequantize(*quantize(numbers, shape.cache_dtype), shape.cache_dtype)
    return numbers.astype(np.float32)

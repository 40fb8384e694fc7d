"""Codes of a quantized cache: the kernels' bits equal ml_dtypes' and the oracle's; nothing strays past half a step."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ostinato.engines.io_table import QUANTIZED_CACHES
from ostinato.engines.program import StepShape
from ostinato.plugins.cache_codes import dequantize, quantize, split_cache
from ostinato.plugins.operator_shapes import AttentionShape
from ostinato.plugins.paged_attention import AttentionAttributes
from ostinato.plugins.paged_attention_launch import (
    cache_write_launch,
    paged_attention_launches,
    paged_attention_scratch,
)
from tests.interpreter import run_launches, scratch_arrays

Array = NDArray[Any]
SIZE, HEADS, BLOCK = 128, 32, 16
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


def write_with_kernel(numbers: Array, cache_dtype: str, heads: int) -> tuple[Array, Array]:
    """Codes and scales that cache_write leaves for [T, heads, D] as keys, [T, heads, D] and [T, heads]."""
    tokens, _, size = numbers.shape
    attributes = AttentionAttributes(heads, heads, size, 1.0)
    shape = AttentionShape(attributes, "float32", cache_dtype, BLOCK, table_width=4, max_rows=tokens)
    caches = [np.zeros((1 + -(-tokens // BLOCK), heads, BLOCK * (size + 4)), np.uint8) for _ in range(2)]
    flat = np.ascontiguousarray(numbers.reshape(tokens, -1), np.float32)
    run_launches(
        [cache_write_launch(shape, StepShape("decode", tokens, tokens))],
        {
            "k": flat,
            "v": -flat,
            "key_cache": caches[0],
            "value_cache": caches[1],
            "out": np.zeros_like(flat),
            "slot_mapping": np.arange(BLOCK, BLOCK + tokens, dtype=np.int32),
            "query_starts": np.arange(tokens + 1, dtype=np.int32),
        },
    )
    codes, scales = split_cache(caches[0], BLOCK)
    return (
        codes[1:].swapaxes(1, 2).reshape(-1, heads, size)[:tokens],
        scales[1:].swapaxes(1, 2).reshape(-1, heads)[:tokens],
    )


def float8_edges() -> Array:
    """Every finite float8, every midpoint between two, and the float32 numbers beside both."""
    grid = np.arange(0x7F, dtype=np.uint8).view(FLOAT8).astype(np.float32)
    at = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    at = np.concatenate([at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(1000))])
    at = np.concatenate([at, np.float32(2.0) ** np.arange(-149, 9)])
    return np.concatenate([at, -at]).clip(-448, 448)


def test_float8_bits_equal_ml_dtypes() -> None:
    rng = np.random.default_rng(1)
    random = rng.standard_normal(10_000) * 2.0 ** rng.uniform(-12, 7, 10_000)
    numbers = np.resize(np.concatenate([float8_edges(), random.clip(-448, 448)]), (3, HEADS, SIZE)).astype(np.float32)
    numbers[..., -1] = 448  # so that every scale is 1
    codes, scales = write_with_kernel(numbers, "float8_e4m3", HEADS)
    assert (scales == 1).all()
    np.testing.assert_array_equal(codes, numbers.astype(FLOAT8).view(np.uint8))


def test_int8_ties_go_to_even() -> None:
    numbers = np.tile(np.arange(-127, 128, dtype=np.float32) / 2, 2)[: 2 * SIZE].reshape(1, 2, SIZE)
    numbers[..., -1] = 127  # so that every scale is 1
    codes, scales = write_with_kernel(numbers, "int8", 2)
    assert (scales == 1).all()
    np.testing.assert_array_equal(codes.view(np.int8), np.rint(numbers))


@pytest.mark.parametrize("cache_dtype", QUANTIZED_CACHES)
def test_codes_equal_oracle_and_stay_within_half_a_step(cache_dtype: str) -> None:
    """Heads of every size from subnormal to huge, and a head of zeros."""
    rng = np.random.default_rng(2)
    numbers = rng.standard_normal((64, 4, 80)).astype(np.float32)
    numbers *= (2.0 ** rng.uniform(-120, 120, (64, 4, 1))).astype(np.float32)
    numbers[0] = 0
    numbers[1, 0] = 0
    numbers[1, 0, :2] = np.array([1, -190], np.float32) * np.float32(1e-45)  # the scale itself is subnormal
    codes, scales = write_with_kernel(numbers, cache_dtype, 4)
    wanted_codes, wanted_scales = quantize(numbers, cache_dtype)
    np.testing.assert_array_equal(codes, wanted_codes)
    np.testing.assert_array_equal(scales, wanted_scales)
    assert not (dequantize(codes, scales, cache_dtype)[0]).any()

    read, kept = dequantize(codes[2:], scales[2:], cache_dtype), scales[2:, :, None]
    if cache_dtype == "int8":
        half_step = kept / 2
    else:  # three fraction bits, down to steps of 2^-9
        half_step = (
            np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(read / kept), 2.0**-6))) / 8, 2.0**-9) / 2 * kept
        )
    assert (np.abs(read - numbers[2:]) <= half_step * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_attention_reads_every_code_exactly(dtype: str) -> None:
    """A row's first token sees its own value alone, so its output is the value as it was read back."""
    values = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)
    values = np.nan_to_num(values, nan=448.0).reshape(1, 2, SIZE)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    shape = AttentionShape(AttentionAttributes(2, 2, SIZE, 1.0), dtype, "float8_e4m3", BLOCK, table_width=1, max_rows=1)
    flat = np.ascontiguousarray(values.reshape(1, -1).astype(kind))
    out, step = np.zeros_like(flat), StepShape("decode", 1, 1)
    caches = [np.zeros((2, 2, BLOCK * (SIZE + 4)), np.uint8) for _ in range(2)]
    tensors: dict[str, Array] = {"q": flat, "k": flat, "v": flat, "out": out}
    tensors |= {"key_cache": caches[0], "value_cache": caches[1]}
    tensors |= {"slot_mapping": np.array([BLOCK], np.int32), "query_starts": np.array([0, 1], np.int32)}
    tensors |= {"context_lens": np.zeros(1, np.int32), "block_tables": np.ones((1, 1), np.int32)}
    tensors |= scratch_arrays(paged_attention_scratch(shape, (step,)))
    run_launches(paged_attention_launches(shape, step), tensors)
    np.testing.assert_array_equal(out, flat)

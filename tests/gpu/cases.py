"""What the GPU tests run, as sizes, and every kernel that they need, to be compiled ahead (in tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.engines.program import StepShape
from ostinato.engines.sizes import MAX_LOGIT_BIAS, MAX_LOGPROBS
from ostinato.plugins.feed_tokens_launch import feed_tokens_launches
from ostinato.plugins.kernel_launch import KernelSpec, Launch, Pointer
from ostinato.plugins.operator_shapes import AttentionShape, SamplingShape
from ostinato.plugins.paged_attention import AttentionAttributes
from ostinato.plugins.paged_attention_launch import Tiling, paged_attention_launches
from ostinato.plugins.stateful_sampling_launch import stateful_sampling_launches

SMALL = Tiling(  # tiles that short rows cross
    max_splits=4, min_split=16, decode_keys=16, decode_stages=1, prefill_lines=16, prefill_keys=16, prefill_warps=1,
    prefill_stages=1,
)  # fmt: skip
DTYPES = (
    ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "int8"),
    ("float16", "float8_e4m3"), ("bfloat16", "int8"), ("bfloat16", "float8_e4m3"), ("float32", "int8"),
)  # fmt: skip
_HEADS = ((2, 2), (3, 1), (8, 2), (8, 1), (20, 1))
_SIZES, _WINDOWS, _SOFTCAPS, _BLOCKS = (32, 64, 80, 128), (0, 7, 0, 20), (0.0, 0.0, 5.0), (4, 16, 32)
MEASURED_ROWS = (1, 8, 64)
MEASURED_VOCABULARIES = (49_152, 151_936)


@dataclass(frozen=True)
class AttentionCase:
    """Sizes, tiles (None: those that are shipped) and how long a row's history gets."""

    shape: AttentionShape
    tiles: Tiling | None
    max_cached: int

    @property
    def name(self) -> str:
        return f"{self.shape.dtype}/{self.shape.cache_dtype}{'' if self.tiles else ' long'}"


def short_case(number: int) -> AttentionCase:
    """One of every pair of types, with heads, windows and blocks of all kinds over small tiles."""
    (q_heads, kv_heads), size = _HEADS[number % len(_HEADS)], _SIZES[number % len(_SIZES)]
    window, softcap = _WINDOWS[number % len(_WINDOWS)], _SOFTCAPS[number % len(_SOFTCAPS)]
    block = _BLOCKS[number % len(_BLOCKS)]
    attributes = AttentionAttributes(q_heads, kv_heads, size, size**-0.5, window, softcap)
    shape = AttentionShape(attributes, *DTYPES[number], block_size=block, table_width=-(-96 // block), max_rows=4)
    return AttentionCase(shape, SMALL, 66)


def long_case(number: int) -> AttentionCase:
    """Heads as a model of 8 billion has them, shipped tiles, rows of several splits."""
    return AttentionCase(model_attention(*DTYPES[number], table_width=128, max_rows=4), None, 1900)


def model_attention(dtype: str, cache_dtype: str, table_width: int, max_rows: int) -> AttentionShape:
    attributes = AttentionAttributes(32, 8, 128, 128**-0.5)
    return AttentionShape(attributes, dtype, cache_dtype, 16, table_width, max_rows)


SHORT_CASES = tuple(short_case(number) for number in range(len(DTYPES)))
LONG_CASES = tuple(long_case(number) for number in range(len(DTYPES) - 1))  # float32 over int8 is no target's


def measured_attention(cache_dtype: str) -> AttentionShape:
    """Rows of up to 32,768 tokens."""
    return model_attention("float16", cache_dtype, table_width=2048, max_rows=64)


def measured_sampling(vocab_size: int) -> SamplingShape:
    return SamplingShape(vocab_size, "float32", MAX_LOGIT_BIAS, MAX_LOGPROBS, max(MEASURED_ROWS))


def nothing_launch() -> Launch:
    """A launch that does nothing."""
    return Launch(KernelSpec("plain_kernels", "nothing", (Pointer("out", "int32"),), (), num_warps=1), (1, 1, 1))


def every_kernel() -> Iterator[KernelSpec]:
    """Plugins' kernels of the tests and measures, and the one that does nothing."""
    decode = StepShape("decode", 4, 4)
    for case in (*SHORT_CASES, *LONG_CASES):
        for step in (decode, StepShape("prefill", 32, case.shape.max_rows)):
            yield from (launch.kernel for launch in paged_attention_launches(case.shape, step, case.tiles))
    for cache_dtype in ("float16", "float8_e4m3"):
        shape = measured_attention(cache_dtype)
        for step in (decode, StepShape("prefill", 4096, 1), StepShape("prefill", 8192, 8)):
            yield from (launch.kernel for launch in paged_attention_launches(shape, step))
    shapes = [SamplingShape(size, dtype, 4, 6, 4) for size, dtype in ((97, "float32"), (1000, "float32"))]
    shapes += [SamplingShape(1000, dtype, 4, 6, 4) for dtype in ("float16", "bfloat16")]
    shapes += [SamplingShape(size, "float32", 4, 6, 4) for size in (5003, 49_152)]
    for sampling in (*shapes, *map(measured_sampling, MEASURED_VOCABULARIES)):
        yield from (launch.kernel for launch in stateful_sampling_launches(sampling, decode))
    yield from (launch.kernel for launch in (*feed_tokens_launches(decode), nothing_launch()))

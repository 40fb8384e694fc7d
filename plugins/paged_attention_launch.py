"""PagedAttention's launch rule: which kernels a step shape runs, over which grids, with which tiles (offline).

    every step      cache_write ─▶ decode_splits ─▶ decode_join     rows of one token
    prefill steps   ─▶ prefill_attention                            rows of more

Everything follows from the recipe's sizes and the step's shape; what a step holds is found on the device. Tiles do not
depend on the step's shape, nor splits on any row but their own, so a row's result is the same in every bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.engines.errors import RecipeError
from ostinato.engines.io_table import QUANTIZED_CACHES, SCALE_BYTES
from ostinato.engines.program import StepShape

from .kernel_launch import Constant, KernelSpec, Launch, Pointer, Scratch
from .operator_shapes import AttentionShape

MIN_DOT = 16  # the least side of a matrix that tensor cores multiply
MIN_SPLIT = 256
MAX_SPLITS = 64
MAX_PROGRAMS = 8192  # of decode_splits: a GPU runs some hundred at once, and most of a long context's find no key
WRITE_ELEMENTS = 4096  # of k, and as many of v, that one program of cache_write moves


@dataclass(frozen=True)
class Tiling:
    """How far each kernel reaches. A decode row's keys are cut into `max_splits` at most, of `min_split` at least."""

    max_splits: int
    min_split: int  # keys, a multiple of `decode_keys`
    decode_keys: int
    decode_stages: int
    prefill_lines: int  # (token, query head) pairs of a tile
    prefill_keys: int
    prefill_warps: int
    prefill_stages: int


def tiling(shape: AttentionShape) -> Tiling:
    """Tiles that fit the registers and the shared memory of every architecture without a spill."""
    wide, quantized = _head_pad(shape) > 64, shape.cache_dtype in QUANTIZED_CACHES
    warps = 4 if _head_pad(shape) <= 128 else 8
    if shape.dtype == "float32":
        keys = 16 if wide else 32
        return Tiling(MAX_SPLITS, MIN_SPLIT, keys, 1 if wide or quantized else 2, 16, keys, warps, 1)
    prefill = (64, 32, warps, 1) if quantized or warps > 4 else (64, 32 if wide else 64, warps, 2)
    return Tiling(MAX_SPLITS, MIN_SPLIT, 32 if wide else 64, 3, *prefill)


def paged_attention_launches(shape: AttentionShape, step: StepShape, tiles: Tiling | None = None) -> tuple[Launch, ...]:
    """The launches of one PagedAttention call, in order; `tiles` None: those of `tiling`.

    Raises RecipeError where a step's q has 2^31 numbers, or scales of a quantized cache would not stand at whole words.
    """
    _check(shape, step)
    tiles = tiles or tiling(shape)
    decode = (cache_write_launch(shape, step), *decode_launches(shape, step, tiles))
    return decode if step.phase == "decode" else (*decode, prefill_launch(shape, step, tiles))


def paged_attention_scratch(
    shape: AttentionShape, steps: Sequence[StepShape], tiles: Tiling | None = None
) -> tuple[Scratch, ...]:
    """What `decode_splits` hands to `decode_join`, for the step with the most rows."""
    lines = (max(step.rows for step in steps), shape.attributes.num_q_heads, _num_splits(shape, tiles or tiling(shape)))
    return (
        Scratch("split_best", "float32", lines),
        Scratch("split_weight", "float32", lines),
        Scratch("split_total", "float32", (*lines, shape.attributes.head_size)),
    )


def used_splits(shape: AttentionShape, context: int, tiles: Tiling | None = None) -> int:
    """How many splits hold keys of a decode row with `context` cached tokens; on the device, `decode_attention.cut`."""
    tiles = tiles or tiling(shape)
    window, tile = shape.attributes.sliding_window, tiles.decode_keys
    first = max(context + 1 - window, 0) if window else 0
    keys = context + 1 - first // tile * tile
    split = max(-(-keys // (_num_splits(shape, tiles) * tile)) * tile, tiles.min_split)
    return -(-keys // split)


def cache_write_launch(shape: AttentionShape, step: StepShape) -> Launch:
    """One program a token and a group of KV heads."""
    kv_heads = shape.attributes.num_kv_heads
    heads = min(_power_of_two(kv_heads), max(1, WRITE_ELEMENTS // _head_pad(shape)))
    names = ("k", "v", "key_cache", "value_cache", "slot_mapping", "query_starts", "out")
    constants = {
        "rows": 0 if step.phase == "decode" else step.rows,
        "heads": heads,
        "group": _group(shape),
        **_sizes(shape, "num_kv_heads", "head_size", "head_pad", "block_size", "cache_dtype"),
    }
    warps = min(4, max(1, heads * _head_pad(shape) // 256))  # 16 bytes a thread in half precision
    kernel = _kernel(shape, "cache_write", "cache_write", names, constants, (warps, 1))
    return Launch(kernel, (step.tokens, -(-kv_heads // heads), 1))


def decode_launches(shape: AttentionShape, step: StepShape, tiles: Tiling) -> tuple[Launch, Launch]:
    """Splits: a program a row, KV head and split that a row may have; where those are many, several splits each.

    Join: a program a row and query head.
    """
    assert tiles.min_split % tiles.decode_keys == 0, "a tile must not straddle two splits"
    a = shape.attributes
    splits = _num_splits(shape, tiles)
    lengths: dict[str, Constant] = {"num_splits": splits, "min_split": tiles.min_split, "tile": tiles.decode_keys}
    group_pad = max(MIN_DOT, _power_of_two(_group(shape)))
    read = ("q", "key_cache", "value_cache", "query_starts", "context_lens", "block_tables")
    handed = ("split_best", "split_weight", "split_total")
    cut = {
        **_sizes(shape, *_ATTENTION),
        "group": _group(shape),
        "group_pad": group_pad,
        **lengths,
    }
    warps = 4 if group_pad * _head_pad(shape) < 4096 else 8
    first = _kernel(shape, "decode_attention", "decode_splits", read + handed, cut, (warps, tiles.decode_stages))
    join = {
        **_sizes(shape, "head_size", "head_pad", "window"),
        "splits_pad": _power_of_two(splits),
        **lengths,
    }
    names = ("query_starts", "context_lens", *handed, "out")
    second = _kernel(shape, "decode_attention", "decode_join", names, join, (4, 1))
    abreast = min(splits, max(1, MAX_PROGRAMS // (step.rows * a.num_kv_heads)))
    return Launch(first, (step.rows, a.num_kv_heads, abreast)), Launch(second, (step.rows, a.num_q_heads, 1))


def prefill_launch(shape: AttentionShape, step: StepShape, tiles: Tiling) -> Launch:
    """One program a KV head and tile; as many tiles as any division of the tokens over the rows can need."""
    lines = max(tiles.prefill_lines, _power_of_two(_group(shape)))
    constants = {
        **_sizes(shape, *_ATTENTION),
        "rows": step.rows,
        "rows_pad": _power_of_two(step.rows),
        "group": _group(shape),
        "lines": lines,
        "tile": tiles.prefill_keys,
    }
    names = ("q", "key_cache", "value_cache", "query_starts", "context_lens", "block_tables", "out")
    warps = (min(8, tiles.prefill_warps * lines // tiles.prefill_lines), tiles.prefill_stages)
    kernel = _kernel(shape, "prefill_attention", "prefill_attention", names, constants, warps)
    most = step.tokens // (lines // _group(shape)) + step.rows
    return Launch(kernel, (most, shape.attributes.num_kv_heads, 1))


def _check(shape: AttentionShape, step: StepShape) -> None:
    assert step.phase == "prefill" or step.tokens == step.rows, f"{step.key} has {step.rows} rows: a token each"
    a = shape.attributes
    if step.tokens * a.num_q_heads * a.head_size >= 1 << 31:
        raise RecipeError(
            f"a step of {step.tokens} tokens has {a.num_q_heads} heads of {a.head_size} each, kernels count to 2^31 "
            "numbers: lower limits.max_step_tokens"
        )
    if shape.cache_dtype in QUANTIZED_CACHES and shape.block_size * a.head_size % SCALE_BYTES:
        raise RecipeError(
            f"a block of {shape.block_size} tokens of heads of {a.head_size} ends within a word, and kv_cache "
            f"{shape.cache_dtype} has a float32 scale after it: give a limits.block_size that {SCALE_BYTES} divides"
        )


_ATTENTION = (
    "num_kv_heads", "head_size", "head_pad", "block_size", "table_width", "cache_dtype", "scale", "window", "softcap",
)  # fmt: skip


def _sizes(shape: AttentionShape, *names: str) -> dict[str, Constant]:
    """The named constants that kernels share."""
    a = shape.attributes
    known: dict[str, Constant] = {
        "num_kv_heads": a.num_kv_heads,
        "head_size": a.head_size,
        "head_pad": _head_pad(shape),
        "block_size": shape.block_size,
        "table_width": shape.table_width,
        "cache_dtype": shape.cache_dtype if shape.cache_dtype in QUANTIZED_CACHES else "plain",
        "scale": float(a.scale),
        "window": a.sliding_window,
        "softcap": float(a.logit_softcap),
    }
    return {name: known[name] for name in names}


def _kernel(
    shape: AttentionShape,
    module: str,
    function: str,
    names: Sequence[str],
    constants: dict[str, Constant],
    warps_and_stages: tuple[int, int],
) -> KernelSpec:
    cache = "uint8" if shape.cache_dtype in QUANTIZED_CACHES else shape.cache_dtype
    kinds = {"key_cache": cache, "value_cache": cache} | dict.fromkeys(("q", "k", "v", "out"), shape.dtype)
    kinds |= dict.fromkeys(("split_best", "split_weight", "split_total"), "float32")
    pointers = tuple(Pointer(name, kinds.get(name, "int32")) for name in names)
    return KernelSpec(module, function, pointers, tuple(sorted(constants.items())), *warps_and_stages)


def _num_splits(shape: AttentionShape, tiles: Tiling) -> int:
    """Of the longest row; a window's first key may stand anywhere in its tile."""
    context, window = shape.table_width * shape.block_size, shape.attributes.sliding_window
    reach = min(context, window + tiles.decode_keys - 1) if window else context
    return min(tiles.max_splits, -(-reach // tiles.min_split))


def _group(shape: AttentionShape) -> int:
    return shape.attributes.num_q_heads // shape.attributes.num_kv_heads


def _head_pad(shape: AttentionShape) -> int:
    return max(MIN_DOT, _power_of_two(shape.attributes.head_size))


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()

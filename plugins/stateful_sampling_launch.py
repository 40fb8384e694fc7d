"""StatefulSampling's launch rule: which kernels, over which grids, with which scratch (offline).

Grids and block sizes depend on the vocabulary alone, apart from one program per row: so a row's result is the same
bits whatever its neighbours and its bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.engines.errors import RecipeError
from ostinato.engines.io_table import DEVICE_SAMPLING_INPUTS, OUTPUTS, STATE_INPUTS
from ostinato.engines.program import StepShape

from .fused_sampling import WORD_BITS
from .kernel_launch import Constant, KernelSpec, Launch, Pointer, Scratch
from .operator_shapes import SamplingShape

MAX_VOCABULARY = 1 << 20  # ids fit in the low 20 bits of a rank, and masses in 62
_GROUP = 128  # tokens whose best one is remembered
_MAX_BLOCK = 1024  # tokens of one program
_MAX_CHUNK = 1024  # candidates of one pass's turn
_BLOCK_WARP = 256  # of a block's tokens, those of one warp
_CHUNK_WARP = 128  # of a chunk's candidates

_SCRATCH_DTYPES = {
    "adjusted": "float32",  # logits after bias and penalties
    "best_any": "int64",  # per group, the best rank
    "best_legal": "int64",  # the same of what the mask allows
    "masses": "int64",  # per block, the legal tokens' mass at the row's temperature
    "sums": "float32",  # per block, of exp(logit - greatest)
    "sizes": "int32",  # per block, tokens that reach the row's bound
    "bounds": "int64",  # a rank that every kept token reaches
    "candidates": "int32",  # ids of the tokens that reach it
}
_DTYPES = {
    **_SCRATCH_DTYPES,
    **{tensor.name: tensor.dtype for tensor in (*DEVICE_SAMPLING_INPUTS, *STATE_INPUTS, *OUTPUTS)},
    "counts_out": "int32",
}

_ADJUST = (
    "logits state_rows mask_rows allowed repetition presence frequency bias_ids bias_values counts "
    "adjusted best_any best_legal"
)
_WEIGH = (
    "state_rows mask_rows allowed temperature top_k top_p min_p num_logprobs adjusted best_any best_legal "
    "masses sums sizes bounds"
)
_PACK = "state_rows mask_rows allowed adjusted sizes bounds candidates"
_DRAW = (
    "state_rows mask_rows allowed uniforms temperature top_k top_p min_p adjusted best_any best_legal "
    "masses sizes bounds candidates tokens"
)
_REPORT = "state_rows num_logprobs tokens adjusted best_any sums logprobs top_ids top_logprobs counts_out"


@dataclass(frozen=True)
class _Tiling:
    """How one vocabulary is split."""

    block: int
    num_blocks: int
    num_groups: int
    chunk: int


def stateful_sampling_launches(shape: SamplingShape, step: StepShape) -> tuple[Launch, ...]:
    """The launches of one call, in order; S = `step.rows`. Pointers are the operator's names and the scratch's.

    Raises RecipeError for a vocabulary over 2^20.
    """
    kernels = _kernels(shape)
    tiling = _tiling(shape.vocab_size)
    per_block, per_row = (step.rows, tiling.num_blocks, 1), (step.rows, 1, 1)
    grids = (per_block, per_block, per_block, per_row, per_row)
    return tuple(Launch(kernel, grid) for kernel, grid in zip(kernels, grids, strict=True))


def stateful_sampling_scratch(shape: SamplingShape, steps: Sequence[StepShape]) -> tuple[Scratch, ...]:
    """What the kernels of one call hand to each other, for the most rows of any of `steps`."""
    rows, tiling = max(step.rows for step in steps), _tiling(shape.vocab_size)
    widths = {
        "adjusted": shape.vocab_size, "best_any": tiling.num_groups, "best_legal": tiling.num_groups,
        "masses": tiling.num_blocks, "sums": tiling.num_blocks, "sizes": tiling.num_blocks, "bounds": 1,
        "candidates": shape.vocab_size,
    }  # fmt: skip
    return tuple(Scratch(name, dtype, (rows, widths[name])) for name, dtype in _SCRATCH_DTYPES.items())


def _kernels(shape: SamplingShape) -> tuple[KernelSpec, ...]:
    tiling, constants = _tiling(shape.vocab_size), _constants(shape)
    dtypes = _DTYPES | {"logits": shape.logits_dtype}

    def kernel(module: str, function: str, pointers: str, names: str, num_warps: int) -> KernelSpec:
        return KernelSpec(
            module=module,
            function=function,
            pointers=tuple(Pointer(name, dtypes[name]) for name in pointers.split()),
            constants=tuple((name, constants[name]) for name in names.split()),
            num_warps=num_warps,
        )

    block_warps = max(1, tiling.block // _BLOCK_WARP)
    chunk_warps = max(1, tiling.chunk // _CHUNK_WARP)
    blocks, padded, groups = "vocab_size block num_blocks", "padded_blocks", "num_groups padded_groups"
    adjust = "vocab_size block group num_groups words max_bias padded_bias"
    draw = f"{blocks} {padded} {groups} words chunk"
    report = f"vocab_size num_blocks {padded} group {groups} num_slots padded_slots"
    return (
        kernel("sampling_adjust", "adjust_logits", _ADJUST, adjust, block_warps),
        kernel("sampling_weigh", "weigh_blocks", _WEIGH, f"{blocks} {groups} words", block_warps),
        kernel("sampling_weigh", "pack_candidates", _PACK, f"{blocks} {padded} words", block_warps),
        kernel("sampling_draw", "draw_tokens", _DRAW, draw, chunk_warps),
        kernel("sampling_logprobs", "report_logprobs", _REPORT, report, block_warps),
    )


def _constants(shape: SamplingShape) -> dict[str, Constant]:
    """Every constant that some kernel takes."""
    tiling = _tiling(shape.vocab_size)
    return {
        "vocab_size": shape.vocab_size,
        "block": tiling.block,
        "num_blocks": tiling.num_blocks,
        "padded_blocks": _power_of_two(tiling.num_blocks),
        "group": _GROUP,
        "num_groups": tiling.num_groups,
        "padded_groups": _power_of_two(tiling.num_groups),
        "words": -(-shape.vocab_size // WORD_BITS),
        "chunk": tiling.chunk,
        "max_bias": shape.max_bias,
        "padded_bias": _power_of_two(shape.max_bias),
        "num_slots": shape.num_logprobs,
        "padded_slots": _power_of_two(shape.num_logprobs),
    }


def _tiling(size: int) -> _Tiling:
    if size > MAX_VOCABULARY:
        raise RecipeError(
            f"the vocabulary has {size} tokens and sampling on a GPU takes at most {MAX_VOCABULARY}: "
            "build for the target cpu"
        )
    block = min(max(_power_of_two(-(-size // 2)), _GROUP), _MAX_BLOCK)
    num_blocks = -(-size // block)
    chunk = min(max(_power_of_two(-(-size // 4)), _GROUP), _MAX_CHUNK)
    return _Tiling(block, num_blocks, num_blocks * (block // _GROUP), chunk)


def _power_of_two(count: int) -> int:
    """The least power of two that holds `count`, at least 1."""
    return 1 << max(0, count - 1).bit_length()

"""The one table of engine inputs and outputs: names for the builder, a form to fill for the runtime (once at start).

Symbols: T tokens in the step, B rows, S rows sampled, N blocks, P block-table width, V vocabulary, W ⌈V/32⌉,
M bias entries, K logprobs returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .sizes import ModelSizes

Role = Literal["step", "cache", "sampling", "output"]
Dim = int | str


@dataclass(frozen=True)
class Tensor:
    """One engine input or output; `shape` mixes fixed sizes and the symbols above."""

    name: str
    dtype: str  # a NumPy dtype name, or "cache" where the target chooses it
    shape: tuple[Dim, ...]
    role: Role


STEP_INPUTS = (
    Tensor("input_ids", "int32", ("T",), "step"),
    Tensor("positions", "int32", ("T",), "step"),
    Tensor("slot_mapping", "int32", ("T",), "step"),  # block * block_size + offset
    Tensor("query_starts", "int32", ("B+1",), "step"),
    Tensor("context_lens", "int32", ("B",), "step"),  # tokens cached before this step
    Tensor("block_tables", "int32", ("B", "P"), "step"),
    Tensor("logits_indices", "int32", ("S",), "step"),  # which of the T tokens are sampled
)

SAMPLING_INPUTS = (
    Tensor("uniforms", "float32", ("S",), "sampling"),
    Tensor("temperature", "float32", ("S",), "sampling"),
    Tensor("top_k", "int32", ("S",), "sampling"),
    Tensor("top_p", "float32", ("S",), "sampling"),
    Tensor("min_p", "float32", ("S",), "sampling"),
    Tensor("repetition", "float32", ("S",), "sampling"),
    Tensor("presence", "float32", ("S",), "sampling"),
    Tensor("frequency", "float32", ("S",), "sampling"),
    Tensor("allowed", "int32", ("S", "W"), "sampling"),  # bit v%32 of word v//32
    Tensor("bias_ids", "int32", ("S", "M"), "sampling"),  # -1 pads
    Tensor("bias_values", "float32", ("S", "M"), "sampling"),
    Tensor("prompt_counts", "int32", ("S", "V"), "sampling"),
    Tensor("output_counts", "int32", ("S", "V"), "sampling"),
    Tensor("logprob_slots", "int32", ("K",), "sampling"),  # a shape carrier: its length is K, its values are not read
)

OUTPUTS = (
    Tensor("tokens", "int32", ("S",), "output"),  # -1: no legal token in that row
    Tensor("logprobs", "float32", ("S",), "output"),
    Tensor("top_ids", "int32", ("S", "K"), "output"),
    Tensor("top_logprobs", "float32", ("S", "K"), "output"),
)


def cache_inputs(sizes: ModelSizes, block_size: int) -> tuple[Tensor, ...]:
    """Key and value cache of every layer, [N, Hkv, block, D]; the target chooses the dtype."""
    shape: tuple[Dim, ...] = ("N", sizes.num_kv_heads, block_size, sizes.head_size)
    return tuple(
        Tensor(f"{kind}_cache.{layer}", "cache", shape, "cache")
        for layer in range(sizes.num_layers)
        for kind in ("key", "value")
    )


def engine_inputs(sizes: ModelSizes, block_size: int) -> tuple[Tensor, ...]:
    """Every input of the whole graph, in order."""
    return STEP_INPUTS + cache_inputs(sizes, block_size) + SAMPLING_INPUTS


def engine_outputs(sizes: ModelSizes, block_size: int) -> tuple[Tensor, ...]:
    """Every output of the whole graph, in order; caches come out aliased where the target can."""
    caches = tuple(
        Tensor(f"{cache.name}.out", cache.dtype, cache.shape, "output") for cache in cache_inputs(sizes, block_size)
    )
    return OUTPUTS + caches

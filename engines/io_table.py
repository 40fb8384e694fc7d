"""The one table of engine inputs and outputs: names for the builder, a form to fill for the runtime (once at start).

Symbols: T tokens in the step, B rows, S rows sampled, N blocks, P block-table width, V vocabulary, W ⌈V/32⌉,
M bias entries, K logprobs returned, R state lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .shards import WHOLE, Shard
from .sizes import ModelSizes

QUANTIZED_CACHES = ("int8", "float8_e4m3")  # one byte a number, and a float32 scale a token and head
SCALE_BYTES = 4

Role = Literal["step", "cache", "sampling", "state", "output"]
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

# Of a program on one stage, not of its graph: which of the tokens that the step before sampled is this token; -1 where
# `input_ids` has it. FeedTokens puts them in place on the device, so the host need not have seen them.
FEED_ROWS = Tensor("feed_rows", "int32", ("T",), "step")

# The device form of sampling: what stays the same while a request lives is state, one line a request. Line 0 is for
# pads, the last one for scored prompt tokens.
STATE_INPUTS = (
    Tensor("bias_ids", "int32", ("R", "M"), "state"),  # ascending; pads are 2^31 - 1, at the end
    Tensor("bias_values", "float32", ("R", "M"), "state"),
    Tensor("counts", "int32", ("R", "V"), "state"),  # times in the output, plus IN_PROMPT if the token is in the prompt
)
IN_PROMPT = 1 << 30
BIAS_PAD = 2**31 - 1

DEVICE_SAMPLING_INPUTS = (
    *(tensor for tensor in SAMPLING_INPUTS if tensor.shape == ("S",)),
    Tensor("state_rows", "int32", ("S",), "sampling"),  # the row's line of the state; 0 for pads
    Tensor("mask_rows", "int32", ("S",), "sampling"),  # the row's line of `allowed`; -1 allows everything
    Tensor("num_logprobs", "int32", ("S",), "sampling"),  # -1 none, 0 the chosen token's, k the k best too
    Tensor("allowed", "int32", ("S", "W"), "sampling"),
    Tensor("logprob_slots", "int32", ("K",), "sampling"),
)

OUTPUTS = (
    Tensor("tokens", "int32", ("S",), "output"),  # -1: no legal token in that row
    Tensor("logprobs", "float32", ("S",), "output"),
    Tensor("top_ids", "int32", ("S", "K"), "output"),
    Tensor("top_logprobs", "float32", ("S", "K"), "output"),
)


def device_cache_shape(kv_cache: str, num_kv_heads: int, block_size: int, head_size: int) -> tuple[Dim, ...]:
    """A cache on a GPU. A quantized (block, head) holds its codes [block, D], then its float32 scales [block]."""
    if kv_cache in QUANTIZED_CACHES:
        return ("N", num_kv_heads, block_size * (head_size + SCALE_BYTES))
    return ("N", num_kv_heads, block_size, head_size)


def step_inputs(sizes: ModelSizes, shard: Shard) -> tuple[Tensor, ...]:
    """A stage's step inputs: the first takes token ids, later ones what the stage before gives; the last samples."""
    input_ids, *paging, logits_indices = STEP_INPUTS
    taken = input_ids if shard.is_first_stage else Tensor("hidden_in", "float32", ("T", sizes.hidden_size), "step")
    return (taken, *paging, *((logits_indices,) if shard.is_last_stage else ()))


def feed_inputs(shard: Shard) -> tuple[Tensor, ...]:
    """What a rank's program takes besides its graph: a rank that takes token ids and samples feeds itself."""
    return (FEED_ROWS,) if shard.is_first_stage and shard.is_last_stage else ()


def cache_inputs(sizes: ModelSizes, block_size: int, shard: Shard = WHOLE) -> tuple[Tensor, ...]:
    """Key and value cache of every layer of a rank, [N, its KV heads, block, D]; the target chooses the dtype.

    `sizes` are the model's; a layer's number is the model's too, whatever the stage.
    """
    num_kv_heads = len(shard.kv_heads(sizes.num_kv_heads))
    shape: tuple[Dim, ...] = ("N", num_kv_heads, block_size, sizes.head_size)
    return tuple(
        Tensor(f"{kind}_cache.{layer}", "cache", shape, "cache")
        for layer in shard.layers(sizes.num_layers)
        for kind in ("key", "value")
    )


def rank_inputs(sizes: ModelSizes, block_size: int, shard: Shard) -> tuple[Tensor, ...]:
    """Every input of one rank's graph, in order; `sizes` are the model's."""
    sampling = SAMPLING_INPUTS if shard.is_last_stage else ()
    return step_inputs(sizes, shard) + cache_inputs(sizes, block_size, shard) + sampling


def rank_outputs(sizes: ModelSizes, block_size: int, shard: Shard) -> tuple[Tensor, ...]:
    """Every output of one rank's graph, in order; caches come out aliased where the target can."""
    hidden_out = Tensor("hidden_out", "float32", ("T", sizes.hidden_size), "output")
    caches = tuple(
        Tensor(f"{cache.name}.out", cache.dtype, cache.shape, "output")
        for cache in cache_inputs(sizes, block_size, shard)
    )
    return (OUTPUTS if shard.is_last_stage else (hidden_out,)) + caches


def engine_inputs(sizes: ModelSizes, block_size: int) -> tuple[Tensor, ...]:
    """Every input of the whole graph, in order."""
    return rank_inputs(sizes, block_size, WHOLE)


def engine_outputs(sizes: ModelSizes, block_size: int) -> tuple[Tensor, ...]:
    """Every output of the whole graph, in order."""
    return rank_outputs(sizes, block_size, WHOLE)

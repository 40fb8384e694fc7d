"""What a rank's operators are compiled for and what they hold, from sizes alone: no graph is traced (offline)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ostinato.engines.io_table import QUANTIZED_CACHES, SCALE_BYTES, Tensor, feed_inputs
from ostinato.engines.program import DTYPE_BYTES, StepShape
from ostinato.engines.recipe import Recipe
from ostinato.engines.shards import Shard
from ostinato.engines.sizes import ModelSizes
from ostinato.plugins.feed_tokens import FEED_TOKENS
from ostinato.plugins.feed_tokens_launch import feed_tokens_launches
from ostinato.plugins.kernel_launch import Launch
from ostinato.plugins.operator_shapes import AttentionShape, SamplingShape
from ostinato.plugins.paged_attention import AttentionAttributes
from ostinato.plugins.paged_attention_launch import paged_attention_launches, paged_attention_scratch
from ostinato.plugins.stateful_sampling_launch import stateful_sampling_launches, stateful_sampling_scratch

from .launch_plan import attention_shape, sampling_shape, step_shapes
from .shard import shard_sizes

_OPENVINO_SCALE_BYTES = 8  # beside each head's slot of an int8 cache: a float32 scale and zero point


@dataclass(frozen=True)
class RankOperators:
    """`sizes`: of the rank. `sampling`: None on a stage that samples nothing. `feeds_tokens`: on the only stage."""

    sizes: ModelSizes
    attention: AttentionShape
    sampling: SamplingShape | None
    feeds_tokens: bool
    steps: tuple[StepShape, ...]

    def launches(self, step: StepShape) -> Mapping[str, tuple[Launch, ...]]:
        """Operator → what one call of it launches."""
        found = {"PagedAttention": paged_attention_launches(self.attention, step)}
        if self.sampling is not None:
            found["StatefulSampling"] = stateful_sampling_launches(self.sampling, step)
        if self.feeds_tokens:
            found[FEED_TOKENS] = feed_tokens_launches(step)
        return found

    @property
    def scratch_bytes(self) -> int:
        scratch = paged_attention_scratch(self.attention, self.steps)
        if self.sampling is not None:
            scratch += stateful_sampling_scratch(self.sampling, self.steps)
        total = 0
        for one in scratch:
            assert all(isinstance(size, int) for size in one.shape), f"scratch {one.name} has no fixed size"
            total += math.prod(size for size in one.shape if isinstance(size, int)) * DTYPE_BYTES[one.dtype]
        return total


def rank_operators(sizes: ModelSizes, recipe: Recipe, shard: Shard) -> RankOperators:
    """Operators of one rank of a model of `sizes`. Raises BuildError where the model can't be cut so."""
    own = shard_sizes(sizes, shard)
    attributes = AttentionAttributes(
        num_q_heads=own.num_q_heads,
        num_kv_heads=own.num_kv_heads,
        head_size=own.head_size,
        scale=float(np.float32(own.head_size**-0.5)),  # as the graph's attribute keeps it: kernels are named by it
        sliding_window=own.sliding_window,
    )
    return RankOperators(
        own,
        attention_shape(attributes, recipe),
        sampling_shape(sizes.vocab_size, recipe) if shard.is_last_stage else None,
        bool(feed_inputs(shard)),
        step_shapes(recipe.limits),
    )


def slot_bytes(kv_cache: str, head_size: int, scale_bytes: int = SCALE_BYTES) -> int:
    """One token's key or value of one head, as a cache holds it."""
    return head_size + scale_bytes if kv_cache in QUANTIZED_CACHES else head_size * DTYPE_BYTES[kv_cache]


def block_bytes(sizes: ModelSizes, recipe: Recipe) -> int:
    """One block of keys and values over all layers of a rank; `sizes`: its own."""
    scale_bytes = _OPENVINO_SCALE_BYTES if recipe.target == "cpu" else SCALE_BYTES
    slots = 2 * sizes.num_layers * sizes.num_kv_heads * recipe.limits.block_size
    return slots * slot_bytes(recipe.kv_cache, sizes.head_size, scale_bytes)


def tensor_bytes(tensors: Iterable[Tensor], symbols: Mapping[str, int]) -> int:
    """Tensors of the I/O table, with numbers for its symbols."""
    return sum(
        DTYPE_BYTES[tensor.dtype] * math.prod(size if isinstance(size, int) else symbols[size] for size in tensor.shape)
        for tensor in tensors
    )

"""Buffers and launches, as a program has them, of a decoder whose matrix products are somebody else's (in tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.engines.io_table import (
    DEVICE_SAMPLING_INPUTS,
    FEED_ROWS,
    OUTPUTS,
    STATE_INPUTS,
    STEP_INPUTS,
    device_cache_shape,
)
from ostinato.engines.program import Buffer, Program, StepShape
from ostinato.engines.sizes import MAX_LOGIT_BIAS, MAX_LOGPROBS, Limits, ModelSizes
from ostinato.plugins.feed_tokens_launch import feed_tokens_launches
from ostinato.plugins.kernel_launch import Launch
from ostinato.plugins.operator_shapes import AttentionShape, SamplingShape
from ostinato.plugins.paged_attention import AttentionAttributes
from ostinato.plugins.paged_attention_launch import paged_attention_launches, paged_attention_scratch
from ostinato.plugins.stateful_sampling_launch import stateful_sampling_launches, stateful_sampling_scratch


@dataclass(frozen=True)
class StackSizes:
    """`dtype`: of weights, caches and logits."""

    sizes: ModelSizes
    limits: Limits
    dtype: str

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        limits = self.limits
        decode = (StepShape("decode", rows, rows) for rows in limits.row_buckets)
        return (*decode, *(StepShape("prefill", tokens, limits.max_rows) for tokens in limits.token_buckets))

    @property
    def attention(self) -> AttentionShape:
        one, limits = self.sizes, self.limits
        attributes = AttentionAttributes(one.num_q_heads, one.num_kv_heads, one.head_size, one.head_size**-0.5)
        width = limits.max_blocks_per_row
        return AttentionShape(attributes, self.dtype, self.dtype, limits.block_size, width, limits.max_rows)

    @property
    def sampling(self) -> SamplingShape:
        return SamplingShape(
            self.sizes.vocab_size, self.dtype, MAX_LOGIT_BIAS, MAX_LOGPROBS, self.limits.max_rows
        )  # fmt: skip

    def attention_launches(self, shape: StepShape) -> tuple[Launch, ...]:
        return paged_attention_launches(self.attention, shape)

    def sampling_launches(self, shape: StepShape) -> tuple[Launch, ...]:
        return stateful_sampling_launches(self.sampling, shape)

    def launches(self) -> Iterator[Launch]:
        for shape in self.shapes:
            yield from (*feed_tokens_launches(shape), *self.attention_launches(shape), *self.sampling_launches(shape))


GPU_STACK = StackSizes(
    ModelSizes("stack", 49_152, 2048, 5632, 8, 16, 4, 128, 1024),
    Limits(16, 64, 512, 1024, 64 * 1024, (1, 8, 64), (512,)),
    "float16",
)
TINY_STACK = StackSizes(
    ModelSizes("stack", 97, 32, 48, 2, 4, 2, 16, 64), Limits(8, 3, 6, 24, 96, (1, 3), (6,)), "float32"
)  # fmt: skip


def stack_program(stack: StackSizes) -> Program:
    """Its buffers; there are no calls, since the stack makes them itself."""
    one, limits, attention = stack.sizes, stack.limits, stack.attention
    inputs = (*STEP_INPUTS, FEED_ROWS, *DEVICE_SAMPLING_INPUTS)
    tables = ((inputs, "input"), (STATE_INPUTS, "state"), (OUTPUTS, "output"))
    buffers = [Buffer(tensor.name, tensor.dtype, tensor.shape, kind) for table, kind in tables for tensor in table]  # type: ignore[arg-type]
    cache_shape = device_cache_shape(stack.dtype, one.num_kv_heads, limits.block_size, one.head_size)
    buffers += [
        Buffer(f"{kind}_cache.{layer}", stack.dtype, cache_shape, "cache")
        for layer in range(one.num_layers)
        for kind in ("key", "value")
    ]
    widths = {"q": one.num_q_heads, "k": one.num_kv_heads, "v": one.num_kv_heads, "out": one.num_q_heads}
    buffers += [Buffer(name, stack.dtype, ("T", heads * one.head_size), "cut") for name, heads in widths.items()]
    buffers.append(Buffer("logits", stack.dtype, ("S", "V"), "cut"))
    scratch = (
        *paged_attention_scratch(attention, stack.shapes),
        *stateful_sampling_scratch(stack.sampling, stack.shapes),
    )
    buffers += [Buffer(part.name, part.dtype, part.shape, "scratch") for part in scratch]
    return Program(tuple(buffers), (), stack.shapes, {}, {})

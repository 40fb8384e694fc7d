"""What our operators launch in every step shape of a build, from their launch rules (offline)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostinato.engines.errors import BuildError
from ostinato.engines.program import KernelLaunch, StepShape
from ostinato.engines.recipe import Recipe
from ostinato.engines.sizes import MAX_LOGIT_BIAS, MAX_LOGPROBS, Limits
from ostinato.plugins.feed_tokens import FEED_TOKENS
from ostinato.plugins.feed_tokens_launch import feed_tokens_launches
from ostinato.plugins.kernel_launch import KernelSpec, Launch, Scratch
from ostinato.plugins.operator_shapes import AttentionShape, SamplingShape
from ostinato.plugins.paged_attention import PAGED_ATTENTION, AttentionAttributes
from ostinato.plugins.paged_attention_launch import paged_attention_launches, paged_attention_scratch
from ostinato.plugins.stateful_sampling import STATEFUL_SAMPLING
from ostinato.plugins.stateful_sampling_launch import stateful_sampling_launches, stateful_sampling_scratch

from .engine_job import prefill_buckets

if TYPE_CHECKING:  # names of types; whoever plans without a graph does without ONNX
    import onnx_ir as ir

Launches = Mapping[str, tuple[Launch, ...]]  # a step shape's key → its launches in order


@dataclass(frozen=True)
class LaunchPlan:
    """Operator name → what it launches, and the scratch that its kernels share, whichever layer calls."""

    steps: tuple[StepShape, ...]
    launches: Mapping[str, Launches]
    scratch: Mapping[str, tuple[Scratch, ...]]

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        """Every kernel, each once."""
        by_step = (launches for operator in self.launches.values() for launches in operator.values())
        return tuple({launch.kernel.name: launch.kernel for step in by_step for launch in step}.values())


def step_shapes(limits: Limits) -> tuple[StepShape, ...]:
    """What is captured: a decode step for every row bucket, a prefill step for every token bucket from 16 on."""
    decode = tuple(StepShape("decode", rows, rows) for rows in limits.row_buckets)
    return decode + tuple(StepShape("prefill", tokens, limits.max_rows) for tokens in prefill_buckets(limits))


def plan_launches(operators: Iterable[ir.Node], recipe: Recipe) -> LaunchPlan:
    """The launches of a rank's operators. Raises BuildError where two layers' attentions differ."""
    nodes = tuple(operators)
    steps = step_shapes(recipe.limits)
    launches: dict[str, Launches] = {}
    scratch: dict[str, tuple[Scratch, ...]] = {}
    attentions = {attention_attributes(node) for node in nodes if node.op_type == PAGED_ATTENTION.name}
    if len(attentions) > 1:
        raise BuildError("layers have attentions of different kinds: GPU targets know models whose layers are alike")
    for attributes in attentions:
        attention = attention_shape(attributes, recipe)
        launches[PAGED_ATTENTION.name] = {step.key: paged_attention_launches(attention, step) for step in steps}
        scratch[PAGED_ATTENTION.name] = paged_attention_scratch(attention, steps)
    for node in (node for node in nodes if node.op_type == STATEFUL_SAMPLING.name):
        sampling = sampling_shape(node.inputs[0].shape[-1], recipe)
        launches[STATEFUL_SAMPLING.name] = {step.key: stateful_sampling_launches(sampling, step) for step in steps}
        scratch[STATEFUL_SAMPLING.name] = stateful_sampling_scratch(sampling, steps)
        if any(value.name == "input_ids" for value in node.graph.inputs):  # takes ids and samples: it feeds itself
            launches[FEED_TOKENS] = {step.key: feed_tokens_launches(step) for step in steps}
    return LaunchPlan(steps, launches, scratch)


def launch_record(launch: Launch) -> KernelLaunch:
    """As a program keeps it."""
    return KernelLaunch(launch.kernel.name, launch.grid, tuple(pointer.name for pointer in launch.kernel.pointers))


def attention_attributes(node: ir.Node) -> AttentionAttributes:
    return AttentionAttributes(**{name: attribute.value for name, attribute in node.attributes.items()})


def attention_shape(attributes: AttentionAttributes, recipe: Recipe) -> AttentionShape:
    limits = recipe.limits
    return AttentionShape(
        attributes=attributes,
        dtype=recipe.weights,
        cache_dtype=recipe.kv_cache,
        block_size=limits.block_size,
        table_width=limits.max_blocks_per_row,
        max_rows=limits.max_rows,
    )


def sampling_shape(vocab_size: int, recipe: Recipe) -> SamplingShape:
    return SamplingShape(
        vocab_size=vocab_size,
        logits_dtype="float32",
        max_bias=MAX_LOGIT_BIAS,
        num_logprobs=MAX_LOGPROBS,
        max_rows=recipe.limits.max_rows,
    )

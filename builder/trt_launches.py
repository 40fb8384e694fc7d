"""Launch tables for operators inside an engine, from the operators' launch rules (offline)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from ostinato.engines.program import DTYPE_BYTES, StepShape
from ostinato.plugins.kernel_launch import Launch, Scratch
from ostinato.plugins.launch_table import LaunchTable, Sizes, StepLaunches
from ostinato.plugins.operator_shapes import AttentionShape, SamplingShape
from ostinato.plugins.paged_attention_launch import paged_attention_launches, paged_attention_scratch
from ostinato.plugins.stateful_sampling_launch import stateful_sampling_launches, stateful_sampling_scratch

from .launch_plan import launch_record

WORKSPACE_ALIGNMENT = 256  # bytes, as TensorRT aligns workspaces

Rule = Callable[[StepShape], tuple[Launch, ...]]
ScratchRule = Callable[[StepShape], tuple[Scratch, ...]]


def attention_table(shape: AttentionShape, steps: Sequence[StepShape]) -> LaunchTable:
    """PagedAttention's launches by (tokens, rows)."""
    return _table(
        lambda step: paged_attention_launches(shape, step),
        lambda step: paged_attention_scratch(shape, [step]),
        lambda step: (step.tokens, step.rows),
        steps,
    )


def sampling_table(shape: SamplingShape, steps: Sequence[StepShape]) -> LaunchTable:
    """StatefulSampling's launches by (rows sampled,)."""
    return _table(
        lambda step: stateful_sampling_launches(shape, step),
        lambda step: stateful_sampling_scratch(shape, [step]),
        lambda step: (step.rows,),
        steps,
    )


def _table(
    rule: Rule, scratch: ScratchRule, sizes_of: Callable[[StepShape], Sizes], steps: Sequence[StepShape]
) -> LaunchTable:
    """A decode and a prefill step of equal sizes look alike inside an engine: prefill's launches do for both."""
    by_phase = sorted(steps, key=lambda step: step.phase == "prefill")
    return LaunchTable({sizes_of(step): _step(rule(step), scratch(step)) for step in by_phase})


def _step(launches: tuple[Launch, ...], scratch: tuple[Scratch, ...]) -> StepLaunches:
    offsets: dict[str, int] = {}
    end = 0
    for part in scratch:
        sizes = [size for size in part.shape if isinstance(size, int)]
        assert len(sizes) == len(part.shape), f"{part.name} has {part.shape}: an engine's workspace has no symbols"
        offsets[part.name] = end
        end += -(-prod(sizes) * DTYPE_BYTES[part.dtype] // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return StepLaunches(
        tuple(map(launch_record, launches)),
        offsets,
        end,
    )

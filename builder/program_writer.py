"""Writes down what a rank does in a step: calls in order, over which buffers, with which launches (offline)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from ostinato.engines.io_table import FEED_ROWS
from ostinato.engines.program import (
    Buffer,
    Call,
    CollectiveCall,
    EngineCall,
    KernelCall,
    KernelInfo,
    Program,
)
from ostinato.plugins.feed_tokens import FEED_TOKENS
from ostinato.plugins.operator_schema import OperatorSchema
from ostinato.plugins.paged_attention import PAGED_ATTENTION
from ostinato.plugins.stateful_sampling import STATEFUL_SAMPLING

from .cut import Cut, Segment
from .launch_plan import LaunchPlan, launch_record
from .program_buffers import BufferPlan, plan_buffers

ENGINES, GRAPHS, KERNELS = "engines", "graphs", "kernels"  # folders of a rank
_SCHEMAS = {schema.name: schema for schema in (PAGED_ATTENTION, STATEFUL_SAMPLING)}
_FEED = KernelCall(
    "feed", FEED_TOKENS, {"input_ids": "input_ids", "feed_rows": FEED_ROWS.name, "last_tokens": "tokens"}
)
_CALL_NAMES = {PAGED_ATTENTION.name: "attention", STATEFUL_SAMPLING.name: "sampling"}


def write_program(
    cut: Cut,
    plan: LaunchPlan,
    kernels: Mapping[str, Mapping[str, KernelInfo]],
    weight_offsets: Mapping[str, int],
    table_width: int,
    engine_files: Mapping[str, str] | None = None,
) -> Program:
    """The program of a rank whose operators run between engine segments; one that feeds itself does so first.

    `weight_offsets`: shared parameter → its place in weights.bin. `table_width`: P. `engine_files`: segment → file,
    where several segments are one engine; None: each has its own.
    """
    buffers = plan_buffers(cut, weight_offsets, table_width)
    scratch = tuple(
        Buffer(scratch_name(operator, one.name), one.dtype, one.shape, "scratch")
        for operator, shapes in plan.scratch.items()
        for one in shapes
    )
    feeds = FEED_TOKENS in plan.launches
    fed = (Buffer(FEED_ROWS.name, FEED_ROWS.dtype, FEED_ROWS.shape, "input"),) if feeds else ()
    return Program(
        buffers=(*fed, *buffers.buffers.values(), *scratch),
        calls=(*((_FEED,) if feeds else ()), *_calls(cut, plan, buffers, engine_files or {})),
        step_shapes=plan.steps,
        launches={
            operator: {key: tuple(map(launch_record, launches)) for key, launches in by_step.items()}
            for operator, by_step in plan.launches.items()
        },
        kernels=kernels,
    )


def scratch_name(operator: str, name: str) -> str:
    """All calls of an operator share its scratch: one runs after another."""
    return f"{_CALL_NAMES[operator]}.{name}"


def engine_file(segment: Segment) -> str:
    return f"{ENGINES}/{segment.name}.engine"


def graph_file(segment: Segment) -> str:
    """What the engine of that name computes, as ONNX with weights as inputs."""
    return f"{GRAPHS}/{segment.name}.onnx"


def _calls(cut: Cut, plan: LaunchPlan, buffers: BufferPlan, engine_files: Mapping[str, str]) -> Iterable[Call]:
    counts: dict[str, int] = {}
    for part in cut.parts:
        if isinstance(part, Segment):
            yield EngineCall(
                part.name,
                engine_files.get(part.name, engine_file(part)),
                {part.tensor(value): buffers.of[value.name] for value in part.inputs},
                {part.tensor(value): buffers.of[value.name] for value in part.outputs},
            )
            continue
        number = counts[part.op_type] = counts.get(part.op_type, -1) + 1
        if part.op_type in _SCHEMAS:
            yield _kernel_call(part, number, plan, buffers)
        else:
            source, target = part.inputs[0], part.outputs[0]
            name = f"{part.op_type.lower()}_{number:02}"
            yield CollectiveCall(name, part.op_type, buffers.of[source.name], buffers.of[target.name])


def _kernel_call(node: ir.Node, number: int, plan: LaunchPlan, buffers: BufferPlan) -> KernelCall:
    schema: OperatorSchema = _SCHEMAS[node.op_type]
    formals = zip((*schema.inputs, *schema.outputs), (*node.inputs, *node.outputs), strict=True)
    arguments = {formal: buffers.of[value.name] for formal, value in formals}
    arguments |= {one.name: scratch_name(schema.name, one.name) for one in plan.scratch[schema.name]}
    name = _CALL_NAMES[schema.name]
    return KernelCall(f"{name}_{number:02}" if schema is PAGED_ATTENTION else name, schema.name, arguments)

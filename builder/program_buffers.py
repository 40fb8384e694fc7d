"""Which device buffer every value of a cut graph lies in; buffers between calls are used again (offline)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from ostinato.engines.engine_record import EngineTensor
from ostinato.engines.io_table import DEVICE_SAMPLING_INPUTS, STATE_INPUTS, STEP_INPUTS, Dim
from ostinato.engines.program import Buffer, Kind
from ostinato.plugins.paged_attention import PAGED_ATTENTION
from ostinato.plugins.stateful_sampling import STATEFUL_SAMPLING

from .cut import Cut, Segment

DTYPES: Mapping[ir.DataType, str] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.INT32: "int32",
    ir.DataType.INT64: "int64",
    ir.DataType.UINT8: "uint8",
    ir.DataType.INT8: "int8",
    ir.DataType.BOOL: "bool",
}
# Outputs that are an input changed in place: operator → output's place → input's name.
_ALIASES = {
    PAGED_ATTENTION.name: {1: "key_cache", 2: "value_cache"},
    STATEFUL_SAMPLING.name: {4: "counts"},
}
_INPUTS = {PAGED_ATTENTION.name: PAGED_ATTENTION.inputs, STATEFUL_SAMPLING.name: STATEFUL_SAMPLING.inputs}
_STEP = {tensor.name for tensor in (*STEP_INPUTS, *DEVICE_SAMPLING_INPUTS)}
_STATE = {tensor.name for tensor in STATE_INPUTS}


@dataclass
class BufferPlan:
    """`buffers` by name; `of`: value's name → buffer's name."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)

    def add(self, value: ir.Value, kind: Kind, name: str, offset: int = 0) -> None:
        self.of[value.name] = name
        self.buffers.setdefault(name, Buffer(name, DTYPES[value.dtype], shape_of(value), kind, offset))


def shape_of(value: ir.Value) -> tuple[Dim, ...]:
    return tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)


def engine_tensors(segment: Segment, values: Iterable[ir.Value]) -> tuple[EngineTensor, ...]:
    """What the segment's engine takes or gives, under the engine's names."""
    return tuple(EngineTensor(segment.tensor(value), DTYPES[value.dtype], shape_of(value)) for value in values)


def plan_buffers(cut: Cut, offsets: Mapping[str, int], table_width: int) -> BufferPlan:
    """Give every value that a call reads or writes its buffer.

    `offsets`: shared parameter → its place in weights.bin. A value between calls takes a free buffer of its type and
    shape, which is free again after the last call that reads it: calls run one after another.
    """
    plan = BufferPlan()
    last_use = _last_uses(cut)
    free: dict[tuple[str, tuple[Dim, ...]], list[str]] = defaultdict(list)
    busy: list[tuple[int, ir.Value]] = []
    for place, part in enumerate(cut.parts):
        for value in _inputs(part):
            if value.producer() is None and value.name not in plan.of:
                _bind_input(plan, value, offsets, table_width)
        for index, value in enumerate(_outputs(part)):
            alias = _alias(part, index)
            if alias is not None:
                plan.of[value.name] = plan.of[alias.name]
            elif value.is_graph_output():
                plan.add(value, "output", value.name)
            else:
                _take(plan, value, free)
                busy.append((last_use.get(value.name, place), value))
        for end, value in busy:
            if end == place:
                free[DTYPES[value.dtype], shape_of(value)].append(plan.of[value.name])
        busy = [entry for entry in busy if entry[0] > place]
    return plan


def _last_uses(cut: Cut) -> dict[str, int]:
    return {value.name: place for place, part in enumerate(cut.parts) for value in _inputs(part)}


def _inputs(part: Segment | ir.Node) -> tuple[ir.Value, ...]:
    return tuple(value for value in part.inputs if value is not None)


def _outputs(part: Segment | ir.Node) -> tuple[ir.Value, ...]:
    return tuple(part.outputs)


def _alias(part: Segment | ir.Node, index: int) -> ir.Value | None:
    """The input that an operator's output is, changed in place."""
    if isinstance(part, Segment):
        return None
    name = _ALIASES.get(part.op_type, {}).get(index)
    return None if name is None else part.inputs[_INPUTS[part.op_type].index(name)]


def _bind_input(plan: BufferPlan, value: ir.Value, offsets: Mapping[str, int], table_width: int) -> None:
    if value.name in offsets:
        plan.add(value, "weight", value.name, offsets[value.name])
    elif value.name in _STATE:
        plan.add(value, "state", value.name)
    elif "_cache." in value.name:
        plan.add(value, "cache", value.name)
    elif value.name == "block_tables":
        plan.of[value.name] = value.name
        plan.buffers[value.name] = Buffer(value.name, "int32", ("B", table_width), "input")
    else:
        assert value.name in _STEP or not value.name.startswith("layers."), f"{value.name} has no buffer"
        plan.add(value, "input", value.name)


def _take(plan: BufferPlan, value: ir.Value, free: dict[tuple[str, tuple[Dim, ...]], list[str]]) -> None:
    pool = free[DTYPES[value.dtype], shape_of(value)]
    if pool:
        plan.of[value.name] = pool.pop(0)
        return
    count = sum(buffer.kind == "cut" for buffer in plan.buffers.values())
    plan.add(value, "cut", f"cut_{count}")

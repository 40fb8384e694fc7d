"""What a segment's values are called inside its engine: by their part in it, not by their place in the model (offline).

Two layers that compute the same are then the same graph, and where weights are bound from outside, one engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, count

import onnx_ir as ir

from ostinato.plugins.collectives import ALL_GATHER, ALL_REDUCE
from ostinato.plugins.operator_schema import OperatorSchema
from ostinato.plugins.paged_attention import PAGED_ATTENTION
from ostinato.plugins.stateful_sampling import STATEFUL_SAMPLING

from .cut import Cut, Segment, is_operator

SCHEMAS: Mapping[str, OperatorSchema] = {
    schema.name: schema for schema in (PAGED_ATTENTION, STATEFUL_SAMPLING, ALL_REDUCE, ALL_GATHER)
}
_LAYER = re.compile(r"^layers\.\d+\.")


def with_engine_names(cut: Cut) -> Cut:
    """The same cut, whose segments call their values so."""
    parts = (replace(part, names=engine_names(part)) if isinstance(part, Segment) else part for part in cut.parts)
    return replace(cut, parts=tuple(parts))


def engine_names(segment: Segment) -> dict[str, str]:
    """Value's name → its name in the segment's engine, for everything that the segment reads or makes.

    A parameter loses its layer's number; what an operator takes or gives is called as there (`q`, `out`); what else
    crosses a cut is `carried_0` … where it comes in and `passed_0` … where it goes out.
    """
    names: dict[str, str] = {}
    carried = count()

    def name(value: ir.Value, wanted: str) -> None:
        taken = set(names.values())  # two layers' parameters can lose their difference, for one
        names[value.name] = next(n for n in chain([wanted], (f"{wanted}.{i}" for i in count(1))) if n not in taken)

    for value in (*segment.parameters, *segment.inputs):
        if value.producer() is None:
            name(value, _LAYER.sub("", value.name))
        else:
            name(value, _given(value) or f"carried_{next(carried)}")
    passed = count()
    for value in segment.outputs:
        name(value, _taken(value) or (value.name if value.is_graph_output() else f"passed_{next(passed)}"))
    for index, value in enumerate(segment.constants):
        name(value, f"constant_{index}")
    for index, node in enumerate(segment.nodes):
        for place, value in enumerate(node.outputs):
            if value.name not in names:
                name(value, f"{node.op_type}_{index}" + (f".{place}" if place else ""))
    return names


def _given(value: ir.Value) -> str | None:
    """The operator's name for an output of its own."""
    node = value.producer()
    return SCHEMAS[node.op_type].outputs[value.index()] if is_operator(node) else None


def _taken(value: ir.Value) -> str | None:
    """The operator's name for what it takes; the first that takes it decides."""
    return next((SCHEMAS[node.op_type].inputs[index] for node, index in value.uses() if is_operator(node)), None)

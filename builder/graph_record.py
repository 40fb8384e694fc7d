"""What a manifest keeps of an engine's graph: how often each operator stands in it, and a digest (offline)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir

from ostinato.engines.engine_record import EngineInfo
from ostinato.engines.manifest import digest_of


def with_graph(info: EngineInfo, model: Path) -> EngineInfo:
    """The engine's record with what the ONNX file that it was built from says; no weight is read."""
    graph = ir.serde.deserialize_model(onnx.load(model, load_external_data=False)).graph
    return replace(info, operators=operator_counts(graph), graph_digest=graph_digest(graph))


def operator_counts(graph: ir.Graph) -> Mapping[str, int]:
    """Operator → count, such as {"Gemm": 4, "ostinato::PagedAttention": 1}."""
    counts = Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in graph)
    return dict(sorted(counts.items()))


def graph_digest(graph: ir.Graph) -> str:
    """SHA-256 of inputs, nodes with their attributes, outputs and the shapes of weights, but not of their values."""
    return digest_of(
        {
            "inputs": [_form(value) for value in graph.inputs],
            "weights": sorted(_form(value) for value in graph.initializers.values()),
            "nodes": [_node(node) for node in graph],
            "outputs": [_form(value) for value in graph.outputs],
        }
    )


def _node(node: ir.Node) -> list[object]:
    return [
        node.domain,
        node.op_type,
        [value.name if value is not None else None for value in node.inputs],
        [value.name for value in node.outputs],
        {name: _attribute(attribute) for name, attribute in sorted(node.attributes.items())},
    ]


def _attribute(attribute: ir.Attr) -> object:
    """Tensors count by their bytes, since a constant in a node is no weight."""
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return [str(tensor.dtype), str(tensor.shape), tensor.tobytes().hex()]
    return str(attribute.value)


def _form(value: ir.Value) -> list[str]:
    return [str(value.name), str(value.dtype), str(value.shape)]

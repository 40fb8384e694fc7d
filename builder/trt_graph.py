"""Graph passes for operators inside a TensorRT engine: nodes that its parser takes for plugins (offline).

The parser looks a foreign node up in the plugin registry by name, version and namespace, and hands its attributes to
the creator; so a node carries its launches and the dtypes that they were compiled for.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx
import onnx_ir as ir

from ostinato.engines.program import StepShape
from ostinato.engines.recipe import Recipe
from ostinato.plugins.collectives import ALL_GATHER, ALL_REDUCE
from ostinato.plugins.operator_schema import DOMAIN, VERSION
from ostinato.plugins.paged_attention import PAGED_ATTENTION
from ostinato.plugins.stateful_sampling import STATEFUL_SAMPLING

from .cut import Cut, Segment, is_operator
from .half import Arrays
from .launch_plan import attention_attributes, attention_shape, sampling_shape
from .segment_model import write_segment
from .trt_collective import Collective
from .trt_launches import attention_table, sampling_table

WHOLE_NAME = "decoder"
_PLACEHOLDERS = {ALL_REDUCE.name: "all_reduce", ALL_GATHER.name: "all_gather"}
_CACHES = slice(3, 5)  # of PagedAttention's inputs; its second and third outputs are the same in place
_PLUGINS = (PAGED_ATTENTION.name, STATEFUL_SAMPLING.name)


def stand_in_collectives(graph: ir.Graph) -> dict[str, Collective]:
    """Replace every collective by an Identity, since the parser knows none; returns what each stands for, by name."""
    found: dict[str, Collective] = {}
    for node in [node for node in graph if node.domain == DOMAIN and node.op_type in _PLACEHOLDERS]:
        name = f"{_PLACEHOLDERS[node.op_type]}_{len(found)}"
        value = node.outputs[0]
        identity = ir.node("Identity", [node.inputs[0]], name=name)
        identity.outputs[0].shape, identity.outputs[0].dtype = value.shape, value.dtype
        graph.insert_before(node, identity)
        value.replace_all_uses_with(identity.outputs[0], replace_graph_outputs=True)
        kept = value.name
        graph.remove(node, safe=True)
        identity.outputs[0].name = kept
        found[name] = Collective(node.op_type, node.attributes["group_size"].as_int())
    return found


def ask_for_plugins(graph: ir.Graph, recipe: Recipe, steps: tuple[StepShape, ...]) -> None:
    """Give every operator of ours the attributes that its plugin is made of; quantized caches become int8.

    TensorRT's plugins take no uint8. A cache's bytes are what kernels make of them, so the sign means nothing.
    """
    for node in [node for node in graph if node.op_type in _PLUGINS]:
        if node.op_type == PAGED_ATTENTION.name:
            shape = attention_shape(attention_attributes(node), recipe)
            texts = {"dtype": shape.dtype, "cache_dtype": shape.cache_dtype}
            table = attention_table(shape, steps)
            for value in (*node.inputs[_CACHES], *node.outputs[1:]):
                value.dtype = ir.DataType.INT8 if value.dtype == ir.DataType.UINT8 else value.dtype
        else:
            sampling = sampling_shape(node.inputs[0].shape[-1], recipe)
            texts = {"logits_dtype": sampling.logits_dtype}
            table = sampling_table(sampling, steps)
        texts |= {"launches": table.to_json(), "plugin_version": str(VERSION), "plugin_namespace": DOMAIN}
        for name, text in texts.items():
            node.attributes[name] = ir.AttrString(name, text)


def whole_cut(graph: ir.Graph, parameters: Collection[str]) -> Cut:
    """The graph as one piece: every node is in the engine."""
    read = [value for value in graph.inputs if value.uses()]
    outer = [value for value in read if value.name not in parameters]
    held = [value for value in read if value.name in parameters]
    constants = tuple(graph.initializers.values())
    segment = Segment(WHOLE_NAME, tuple(graph), tuple(outer), tuple(graph.outputs), tuple(held), constants)
    return Cut((segment,), ())


def write_whole(segment: Segment, parameters: Arrays, opset: int, folder: Path) -> tuple[Path, int]:
    """Write the graph file and its weights beside it, as `write_segment`; nodes of ours keep their domain.

    No function body goes along: the parser would inline it and ask for no plugin.
    """
    path, weight_bytes = write_segment(segment, parameters, opset, folder)
    model = onnx.load(path, load_external_data=False)
    model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, VERSION))
    outer = {value.name for value in (*segment.inputs, *segment.outputs)}
    around = {
        value.name: value for node in segment.nodes if is_operator(node) for value in (*node.inputs, *node.outputs)
    }
    inner = [value for name, value in around.items() if name not in outer]  # no inference gets past an operator of ours
    model.graph.value_info.extend(ir.serde.serialize_value(value) for value in inner)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path, weight_bytes

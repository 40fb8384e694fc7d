"""Graph passes: each takes the model and a few facts, changes the graph and nothing else (offline)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx
import onnx_ir as ir
import onnxscript.optimizer

from ostinato.engines.io_table import Dim, Tensor

DOMAIN = "ostinato"
LOGITS = "logits"


def fold_constants(model: ir.Model) -> ir.Model:
    """Fold shape arithmetic and drop what nothing uses; weights are graph inputs here, so they stay whole."""
    onnxscript.optimizer.optimize_ir(model)
    return model


def name_interface(model: ir.Model, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> ir.Model:
    """Give the first graph inputs and all outputs the names and symbolic shapes of the I/O table."""
    for value, tensor in zip(model.graph.inputs, inputs, strict=False):
        value.name = tensor.name
        _set_symbols(value, tensor)
    for value, tensor in zip(model.graph.outputs, outputs, strict=True):
        value.name = tensor.name
        _set_symbols(value, tensor)
    return model


def named_shapes(model: ir.Model, inputs: Sequence[Tensor]) -> dict[ir.Value, ir.Shape]:
    """Shapes of every inner value in the I/O table's symbols, asked before `name_interface`; set again after names.

    The exporter has symbols of its own, one an input axis: the first input that an axis comes from names it.
    """
    symbols: dict[str, Dim] = {}
    for value, tensor in zip(model.graph.inputs, inputs, strict=False):
        for found, size in zip(value.shape, tensor.shape, strict=True):
            if not isinstance(found, int):
                symbols.setdefault(str(found), size)
    return {
        value: ir.Shape([size if isinstance(size, int) else symbols.get(str(size), str(size)) for size in value.shape])
        for node in model.graph
        for value in node.outputs
        if value.shape is not None
    }


def _set_symbols(value: ir.Value, tensor: Tensor) -> None:
    fixed = ("V", "W")  # symbols of the table that are the model's own sizes
    value.shape = ir.Shape(
        [
            found if isinstance(size, int) or size in fixed else size
            for found, size in zip(value.shape, tensor.shape, strict=True)
        ]
    )


def name_values(model: ir.Model) -> ir.Model:
    """Name nodes and inner values by operator and place, so that names depend on the graph alone."""
    graph = model.graph
    kept = {value.name for value in (*graph.inputs, *graph.outputs)}
    inner = [value for value in graph.initializers.values() if value.name not in kept]
    for value in inner:
        del graph.initializers[value.name]
    for index, value in enumerate(inner):
        value.name = f"constant_{index}"
        graph.initializers[value.name] = value
    for index, node in enumerate(graph):
        node.name = f"{node.op_type}_{index}"
        for place, value in enumerate(node.outputs):
            if value.name not in kept:
                value.name = node.name if len(node.outputs) == 1 else f"{node.name}.{place}"
                value.shape = None  # names the exporter's symbols; shape inference finds it again
        if node.op_type == "FusedSampling":
            node.inputs[0].name = LOGITS
    return model


def drop_notes(model: ir.Model) -> ir.Model:
    """Remove doc strings, source locations and the exporter's own marks."""
    model.doc_string, model.producer_name, model.producer_version = None, DOMAIN, None
    model.metadata_props.clear()
    model.graph.doc_string, model.graph.name = None, "decoder"
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.doc_string = None
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    return model


def attach_functions(model: ir.Model, functions: Iterable[onnx.FunctionProto]) -> ir.Model:
    """Put the body of every custom operator that the graph uses into it: it then runs wherever standard ones do."""
    model.functions.clear()
    used = {(node.domain, node.op_type) for node in model.graph}
    for proto in functions:
        function = ir.serde.deserialize_function(proto)
        if (function.domain, function.name) not in used:
            continue
        model.functions[function.identifier()] = function
        model.opset_imports[function.domain] = 1
    return model

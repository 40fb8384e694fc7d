"""A segment as an ONNX file with its weights in a file beside it: what an engine is built from (offline)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from .cut import Segment
from .half import Arrays

_IR_VERSION = 11  # the first with opset 23
ALIGNMENT = 256  # bytes, which TensorRT asks of every address that it is given
_INLINE_BYTES = 1024  # smaller tensors stay in the graph file


def write_segment(segment: Segment, parameters: Arrays, opset: int, folder: Path) -> tuple[Path, int]:
    """Write `{name}.onnx` and `{name}.bin` into `folder`; returns the graph file and the bytes of weights.

    Parameters are made one after another, so that memory holds one at a time.
    """
    graph, data = folder / f"{segment.name}.onnx", folder / f"{segment.name}.bin"
    tensors: list[onnx.TensorProto] = []
    total = 0
    with data.open("wb") as file:
        for value in segment.parameters:
            array = parameters[value.name]()
            total += array.nbytes
            tensor = onnx.TensorProto(
                name=segment.tensor(value), data_type=int(value.dtype), dims=list(value.shape.numpy())
            )
            if array.nbytes < _INLINE_BYTES:
                tensor.raw_data = array.tobytes()
            else:
                _point(tensor, data.name, append_aligned(file, array), array.nbytes)
            tensors.append(tensor)
    graph.write_bytes(segment_proto(segment, tensors, opset).SerializeToString(deterministic=True))
    return graph, total


def write_bare_graph(model: Path, path: Path) -> None:
    """Copy the graph file `model` to `path`, weights as inputs: what ONNX Runtime runs where TensorRT does not."""
    proto = onnx.load(model, load_external_data=False)
    stored = [tensor for tensor in proto.graph.initializer if onnx.external_data_helper.uses_external_data(tensor)]
    for tensor in stored:
        proto.graph.initializer.remove(tensor)
        proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    path.write_bytes(proto.SerializeToString(deterministic=True))


def append_aligned(file: Any, array: NDArray[Any]) -> int:
    """Write an array's bytes at the next aligned place of a binary file; returns that place."""
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
    offset: int = file.tell()
    file.write(array.tobytes())
    return offset


def segment_proto(segment: Segment, tensors: Sequence[onnx.TensorProto], opset: int) -> onnx.ModelProto:
    """The segment as a model of standard operators; `tensors` hold its parameters."""
    names = {
        v.name: segment.tensor(v) for node in segment.nodes for v in (*node.inputs, *node.outputs) if v is not None
    }
    graph = onnx.helper.make_graph(
        [_node(node, names, index if segment.names else None) for index, node in enumerate(segment.nodes)],
        "segment",
        [_value(value, names) for value in segment.inputs],
        [_value(value, names) for value in segment.outputs],
        [*(_constant(value, names) for value in segment.constants), *tensors],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    model.ir_version = _IR_VERSION
    return model


def _node(node: ir.Node, names: Mapping[str, str], index: int | None) -> onnx.NodeProto:
    proto = ir.serde.serialize_node(node)
    if index is not None:
        proto.name = f"{node.op_type}_{index}"
    proto.input[:] = [names[name] if name else "" for name in proto.input]
    proto.output[:] = [names[name] if name else "" for name in proto.output]
    return proto


def _value(value: ir.Value, names: Mapping[str, str]) -> onnx.ValueInfoProto:
    proto = ir.serde.serialize_value(value)
    proto.name = names[value.name]
    return proto


def _constant(value: ir.Value, names: Mapping[str, str]) -> onnx.TensorProto:
    proto = ir.serde.serialize_tensor(value.const_value)
    proto.name = names[value.name]
    return proto


def _point(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Say where in another file the tensor's bytes are."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, entry in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=entry)

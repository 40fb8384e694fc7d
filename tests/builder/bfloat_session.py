"""A bfloat16 graph where ONNX Runtime has no such products: in float32, each result rounded to bfloat16 (in tests)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime

_FLOAT, _BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16


class BfloatSession:
    """Takes and gives what the graph does; between, a bfloat16 number stands in a float32."""

    def __init__(self, model: onnx.ModelProto, options: onnxruntime.SessionOptions) -> None:
        graph = model.graph
        self._rounded = {value.name for value in graph.output if value.type.tensor_type.elem_type == _BFLOAT16}
        nodes = list(_in_float32(graph))
        del graph.node[:]
        graph.node.extend(nodes)
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type == _BFLOAT16:
                value.type.tensor_type.elem_type = _FLOAT
        for tensor in graph.initializer:
            if tensor.data_type == _BFLOAT16:
                wide = np.frombuffer(tensor.raw_data, ml_dtypes.bfloat16).astype(np.float32)
                tensor.raw_data, tensor.data_type = wide.tobytes(), _FLOAT
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        wide = {n: a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a for n, a in feeds.items()}
        found = self._session.run(outputs, wide)
        return [
            array.astype(ml_dtypes.bfloat16) if name in self._rounded else array
            for name, array in zip(outputs, found, strict=True)
        ]


def _in_float32(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes in order; behind each that gives bfloat16 two casts, there and back."""
    half = {value.name for value in graph.input if value.type.tensor_type.elem_type == _BFLOAT16}
    half |= {tensor.name for tensor in graph.initializer if tensor.data_type == _BFLOAT16}
    for node in graph.node:
        gives = node.input[0] in half
        if node.op_type == "Cast":
            gives = node.attribute[0].i == _BFLOAT16
            node.attribute[0].i = _FLOAT if gives else node.attribute[0].i
        names = list(node.output)
        if gives:
            half |= set(names)
            node.output[:] = [f"{name}.exact" for name in names]
        yield node
        for name in names if gives else ():
            yield onnx.helper.make_node("Cast", [f"{name}.exact"], [f"{name}.narrow"], to=_BFLOAT16)
            yield onnx.helper.make_node("Cast", [f"{name}.narrow"], [name], to=_FLOAT)

"""Weight precision as ONNX: which numbers a weight is stored in, and the nodes that read it back as float32 (offline).

A form takes one weight [N, K] to a few stored pieces, and says which nodes make the float32 weight of them again. The
portable graph stays standard ONNX; targets that multiply packed weights directly recognise these chains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ostinato.engines.errors import BuildError

from .checkpoint import F32, Checkpoint
from .weights import Parameters

GROUP = 32  # inputs that share a scale; what GGUF uses too
_LEVELS_INT8 = 127
_LEVELS_UINT4 = 15

Pieces = dict[str, Any]  # suffix → stored array
Layout = dict[str, tuple[ir.DataType, tuple[int, ...]]]


@dataclass(frozen=True)
class Form:
    """One way to store a weight.

    `make(weight)`: the stored pieces. `layout(N, K)`: dtype and shape of each. `read(pieces)`: the nodes that make
    the float32 weight [N, K] of them, the last of which gives it.
    """

    name: str
    make: Callable[[F32], Pieces]
    layout: Callable[[int, int], Layout]
    read: Callable[[Mapping[str, ir.Value]], list[ir.Node]]
    is_grouped: bool = False


def _int8_group(weight: F32) -> Pieces:
    """Symmetric int8, one scale for 32 inputs of a channel: exact for Q8_0."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    scale = _nonzero(np.abs(groups).max(axis=2, keepdims=True) / _LEVELS_INT8)
    return {"codes": np.rint(groups / scale).astype(np.int8), "scale": scale, "shape": _shape(weight)}


def _uint4_group(weight: F32) -> Pieces:
    """uint4 between the smallest and the largest of 32 inputs; the zero is a float, so that Q4_1 loses nothing."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    scale = _nonzero((high - low) / _LEVELS_UINT4)
    codes = np.clip(np.rint((groups - low) / scale), 0, _LEVELS_UINT4)
    return {
        "codes": codes.astype(ml_dtypes.uint4),
        "zero": (-low / scale).astype(np.float32),
        "scale": scale,
        "shape": _shape(weight),
    }


def _bfloat16(weight: F32) -> Pieces:
    return {"bfloat16": weight.astype(ml_dtypes.bfloat16)}


def _shape(weight: F32) -> Any:
    return np.array(weight.shape, np.int64)


def _nonzero(scale: Any) -> F32:
    """A group of equal zeros has scale 0, which nothing can be divided by."""
    array: F32 = np.where(scale == 0, 1, scale).astype(np.float32)
    return array


def _read_groups(pieces: Mapping[str, ir.Value]) -> list[ir.Node]:
    """(codes - zero) * scale, then groups side by side.

    Written out because DequantizeLinear has no float zero point, and because its blocked form makes OpenVINO copy the
    codes into groups at load, where these stay in the mapped file.
    """
    nodes = [ir.node("Cast", [pieces["codes"]], {"to": ir.DataType.FLOAT})]
    if "zero" in pieces:
        nodes.append(ir.node("Sub", [nodes[-1].outputs[0], pieces["zero"]]))
    nodes.append(ir.node("Mul", [nodes[-1].outputs[0], pieces["scale"]]))
    return [*nodes, ir.node("Reshape", [nodes[-1].outputs[0], pieces["shape"]])]


def _read_bfloat16(pieces: Mapping[str, ir.Value]) -> list[ir.Node]:
    return [ir.node("Cast", [pieces["bfloat16"]], {"to": ir.DataType.FLOAT})]


_FLOAT = ir.DataType.FLOAT


def _grouped(name: str, make: Callable[[F32], Pieces], codes: ir.DataType, *, has_zero: bool) -> Form:
    """A form whose weight [N, K] is kept as codes [N, K/32, 32], with float scales, and zeros if any, [N, K/32, 1]."""

    def layout(n: int, k: int) -> Layout:
        side = (_FLOAT, (n, k // GROUP, 1))
        pieces: Layout = {"codes": (codes, (n, k // GROUP, GROUP)), "scale": side}
        return pieces | ({"zero": side} if has_zero else {}) | {"shape": (ir.DataType.INT64, (2,))}

    return Form(f"{name} for {GROUP} inputs", make, layout, _read_groups, is_grouped=True)


INT8_GROUP = _grouped("int8 with a scale", _int8_group, ir.DataType.INT8, has_zero=False)
UINT4_GROUP = _grouped("uint4 with a float scale and zero", _uint4_group, ir.DataType.UINT4, has_zero=True)
BFLOAT16 = Form(
    name="bfloat16",
    make=_bfloat16,
    layout=lambda n, k: {"bfloat16": (ir.DataType.BFLOAT16, (n, k))},
    read=_read_bfloat16,
)

# Recipe's weight precision → the form of a layer's linear weights, and of embedding and head (one copy when tied).
FORMS: Mapping[str, tuple[Form, Form]] = {
    "bfloat16": (BFLOAT16, BFLOAT16),
    "int8": (INT8_GROUP, INT8_GROUP),
    "int4": (UINT4_GROUP, INT8_GROUP),
}
# What a published format keeps exactly, up to float32 rounding.
_KEEPS = {"Q4_1": UINT4_GROUP, "Q8_0": INT8_GROUP, "bfloat16": BFLOAT16}


def store_weights(model: ir.Model, parameters: Parameters, precision: str) -> ir.Model:
    """Turn the parameters among the graph inputs into initializers of the recipe's weight precision.

    Norms, biases and rope tables stay float32. Nothing is read yet: initializers make their bytes when written.
    Raises BuildError where a weight can't be cut into groups.
    """
    graph = model.graph
    for value in [value for value in graph.inputs if value.name in parameters]:
        graph.inputs.remove(value)
        form = form_of(value.name, precision)
        if form is None:
            _store(graph, value, _Pieces(partial(_whole, parameters[value.name])), "")
        else:
            _store_as(graph, value, parameters[value.name], form)
    return model


def form_of(name: str, precision: str) -> Form | None:
    """The form that a parameter is stored in, None for plain float32."""
    if precision == "float32" or not name.endswith(".weight") or "norm" in name:
        return None
    return FORMS[precision][name in ("embedding.weight", "head.weight")]


def _store_as(graph: ir.Graph, value: ir.Value, parameter: Callable[[], F32], form: Form) -> None:
    num_outputs, num_inputs = value.shape.numpy()
    if form.is_grouped and num_inputs % GROUP:
        raise BuildError(
            f"{value.name} has {num_inputs} inputs, not a multiple of {GROUP}: choose weights bfloat16 or float32"
        )
    pieces = _Pieces(lambda: form.make(parameter()))
    stored = {}
    for suffix, (dtype, shape) in form.layout(num_outputs, num_inputs).items():
        piece = ir.Value(name=f"{value.name}.{suffix}", type=ir.TensorType(dtype), shape=ir.Shape(shape))
        _store(graph, piece, pieces, suffix)
        stored[suffix] = piece
    for number, (user, index) in enumerate(tuple(value.uses())):
        # Each user reads the codes by nodes of its own: a target folds nodes that two share into plain float32.
        nodes = form.read(stored)
        for node in nodes:
            node.name = f"{value.name}.{number}.{node.op_type}"
            node.outputs[0].name = node.name
        graph.insert_before(graph[0], nodes)
        user.replace_input_with(index, nodes[-1].outputs[0])


def _whole(parameter: Callable[[], F32]) -> Pieces:
    return {"": parameter()}


def _store(graph: ir.Graph, value: ir.Value, pieces: _Pieces, suffix: str) -> None:
    value.const_value = ir.LazyTensor(
        lambda: ir.Tensor(pieces.take(suffix), dtype=value.dtype), dtype=value.dtype, shape=value.shape, name=value.name
    )
    graph.initializers[value.name] = value


class _Pieces:
    """Makes the pieces of one weight together and lets go of each as it is taken, so that memory holds one weight."""

    def __init__(self, make: Callable[[], Pieces]) -> None:
        self._make = make
        self._left: Pieces = {}

    def take(self, suffix: str) -> Any:
        if suffix not in self._left:
            self._left = self._make()
        return self._left.pop(suffix)


def precision_notes(checkpoint: Checkpoint, sources: Mapping[str, tuple[str, ...]], precision: str) -> tuple[str, ...]:
    """What the stored precision loses against the weights as published, one line a kind."""
    lost: Counter[tuple[str, str]] = Counter()
    for name, tensors in sources.items():
        form = form_of(name, precision)
        if form is not None:
            lost.update(
                (checkpoint.formats[t], form.name) for t in tensors if _KEEPS.get(checkpoint.formats[t]) != form
            )
    return tuple(
        f"{count} weights published as {published} are stored as {stored}, which does not hold them exactly"
        for (published, stored), count in sorted(lost.items())
    )

"""Graph pass for GPU targets: linear layers, embedding and attention in half precision, all else in float32 (offline).

    residual ─ norm ─┬─ Cast ─▶ Gemm (half) ─▶ Split … ─ Cast ─▶ rope, silu, residual   (float32)
                     └───────────────────────────────▶ q, k, v ─▶ PagedAttention (half) ─▶ Gemm (half)

Sums of squares, angles and the residual outgrow float16 long before a linear layer's result does, and cost little.
Biases are added in float32, after the Cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ostinato.engines.errors import BuildError
from ostinato.engines.io_table import QUANTIZED_CACHES, device_cache_shape

if TYPE_CHECKING:  # what is a graph and no checkpoint needs no torch
    from .weights import Parameters

Arrays = Mapping[str, Callable[[], NDArray[Any]]]  # parameter → what makes it, in the type it is stored in
HALVES: Mapping[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_FLOAT = ir.DataType.FLOAT
_TYPES = {
    "float32": _FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    **dict.fromkeys(QUANTIZED_CACHES, ir.DataType.UINT8),
}
_MOVERS = ("Split", "Reshape", "Unsqueeze", "Squeeze", "Transpose")  # they move numbers and compute none
_QKV = 3  # PagedAttention's first inputs
_CACHES = slice(3, 5)  # the next two, which its second and third output alias


def use_half(model: ir.Model, parameters: Parameters, weights: str, kv_cache: str) -> tuple[ir.Model, Arrays]:
    """Put `model` into the recipe's precisions; its parameters are graph inputs, and change their type there.

    Returns the model and every parameter in its stored type. Making a parameter that `weights` can't hold raises
    BuildError. `weights` "float32" leaves all but the caches as they are.
    """
    stored: dict[str, Callable[[], NDArray[Any]]] = dict(parameters)
    attentions = [node for node in model.graph if node.op_type == "PagedAttention"]
    for node in attentions:
        _retype_caches(node, kv_cache)
    if weights in HALVES:
        half = _TYPES[weights]
        for value in [value for value in model.graph.inputs if is_halved(value)]:
            for node, _ in tuple(value.uses()):
                _halve(model.graph, node, half)
            value.type = ir.TensorType(half)  # a type of its own: copies of a graph share theirs
            stored[value.name] = partial(half_array, value.name, parameters[value.name], weights)
        for node in attentions:
            _halve_attention(model.graph, node, half)
        _sink_casts(model.graph)
        _fold_casts(model.graph)
    return model, stored


def is_halved(value: ir.Value) -> bool:
    """A linear layer's weight, the embedding or the head; norms, biases and angles are not."""
    return value.name.endswith(".weight") and "norm" not in value.name


def half_array(name: str, make: Callable[[], NDArray[np.float32]], weights: str) -> NDArray[Any]:
    """A parameter in half precision, rounded to nearest; refuses a number that has none near it."""
    exact = make()
    with np.errstate(over="ignore"):  # told below, by name
        rounded: NDArray[Any] = exact.astype(HALVES[weights])
    if not np.isfinite(rounded.astype(np.float32)).all():
        advice = "set weights and kv_cache to bfloat16" if weights == "float16" else "publish sound weights"
        raise BuildError(
            f"{name} holds {np.abs(exact).max():.6g}, more than {weights} can ({_greatest(weights):.6g}): {advice}"
        )
    return rounded


def _greatest(weights: str) -> float:
    return float(ml_dtypes.finfo(HALVES[weights]).max)


def _retype_caches(node: ir.Node, kv_cache: str) -> None:
    for cache, written in zip(node.inputs[_CACHES], node.outputs[1:], strict=True):
        _, heads, block_size, head_size = cache.shape
        for value in (cache, written):
            value.type = ir.TensorType(_TYPES[kv_cache])
            value.shape = ir.Shape(device_cache_shape(kv_cache, heads, block_size, head_size))


def _halve(graph: ir.Graph, node: ir.Node, half: ir.DataType) -> None:
    """Let a node read its parameter in half: activations are cast to it, the result back, a bias is added after."""
    assert node.op_type in ("Gemm", "MatMul", "Gather"), f"{node.name} reads a weight, and is no linear layer"
    if node.op_type != "Gather":
        _cast_input(graph, node, 0, half)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        node.resize_inputs(2)
    result = _cast_output(graph, node, half)
    if bias is not None:
        add = ir.node("Add", [result, bias], name=f"{node.name}.bias")
        _adopt(add.outputs[0], result, _FLOAT, add.name)
        _take_over(graph, result, add)


def _halve_attention(graph: ir.Graph, node: ir.Node, half: ir.DataType) -> None:
    for index in range(_QKV):
        _cast_input(graph, node, index, half)
    _cast_output(graph, node, half)


def _cast_input(graph: ir.Graph, node: ir.Node, index: int, to: ir.DataType) -> None:
    source = node.inputs[index]
    cast = ir.node("Cast", [source], {"to": to}, name=f"{node.name}.in{index}")
    _adopt(cast.outputs[0], source, to, cast.name)
    graph.insert_before(node, cast)
    node.replace_input_with(index, cast.outputs[0])


def _cast_output(graph: ir.Graph, node: ir.Node, half: ir.DataType) -> ir.Value:
    """Make the node's first output half and cast it back for all who read it; returns the float32 value."""
    value = node.outputs[0]
    cast = ir.node("Cast", [value], {"to": _FLOAT}, name=f"{node.name}.f32")
    _adopt(cast.outputs[0], value, _FLOAT, cast.name)
    value.type = ir.TensorType(half)
    _take_over(graph, value, cast)
    return cast.outputs[0]


def _take_over(graph: ir.Graph, value: ir.Value, node: ir.Node) -> None:
    """Put `node`, which reads `value`, between it and all who read it; a name that others know moves along."""
    new = node.outputs[0]
    for user, index in tuple(value.uses()):
        if user is not node:
            user.replace_input_with(index, new)
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = new
    new.name, value.name = value.name, f"{value.name}.half" if node.op_type == "Cast" else f"{value.name}.raw"
    graph.insert_after(value.producer(), node)


def _adopt(value: ir.Value, like: ir.Value, dtype: ir.DataType, name: str) -> None:
    value.name, value.shape, value.type = name, like.shape, ir.TensorType(dtype)


def _sink_casts(graph: ir.Graph) -> None:
    """Move a Cast to float32 behind the one node that only moves its numbers, so that it meets a Cast to half."""
    for cast in list(graph):
        while cast is not None and _is_cast(cast, to=_FLOAT):
            cast = _sunk(graph, cast)


def _sunk(graph: ir.Graph, cast: ir.Node) -> ir.Node | None:
    """One step of it; returns the Cast to look at next."""
    wide, narrow = cast.outputs[0], cast.inputs[0]
    users = tuple(wide.uses())
    if len(users) != 1 or wide.is_graph_output() or users[0][1] != 0 or users[0][0].op_type not in _MOVERS:
        return None
    mover = users[0][0]
    mover.replace_input_with(0, narrow)
    graph.remove(cast, safe=True)
    last = None
    for value in mover.outputs:
        name = value.name
        last = ir.node("Cast", [value], {"to": _FLOAT}, name=f"{name}.f32")
        _adopt(last.outputs[0], value, _FLOAT, last.name)
        value.type = ir.TensorType(narrow.dtype)
        _take_over(graph, value, last)
    return last if len(mover.outputs) == 1 else None


def _fold_casts(graph: ir.Graph) -> None:
    """Half to float32 to half is nothing: read the first value, and drop what nobody reads any more."""
    for cast in list(graph):
        source = cast.inputs[0].producer() if cast.op_type == "Cast" else None
        if source is not None and _is_cast(source, to=_FLOAT) and source.inputs[0].dtype == cast.outputs[0].dtype:
            cast.outputs[0].replace_all_uses_with(source.inputs[0])
            graph.remove(cast, safe=True)
    for cast in reversed(list(graph)):
        value = cast.outputs[0]
        if cast.op_type == "Cast" and not value.uses() and not value.is_graph_output():
            graph.remove(cast, safe=True)


def _is_cast(node: ir.Node, to: ir.DataType) -> bool:
    return bool(node.op_type == "Cast" and node.attributes["to"].as_int() == int(to))

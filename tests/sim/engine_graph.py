"""What a simulated engine computes: its ONNX graph by ONNX Runtime, our operators in it by their kernels' bodies.

A graph of standard operators is one session. One that holds operators of ours is cut at them, as for an engine a
segment; their launches are those that the nodes carry for a plugin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from ostinato.builder.cut import Segment, cut_at_operators
from ostinato.builder.segment_model import segment_proto
from ostinato.plugins.collectives_onnx import all_gather_function, all_reduce_function
from ostinato.plugins.launch_table import LaunchTable, launch_table_from_json
from ostinato.plugins.operator_schema import DOMAIN
from ostinato.plugins.paged_attention import PAGED_ATTENTION
from ostinato.plugins.stateful_sampling import STATEFUL_SAMPLING

from ..builder.bfloat_session import BfloatSession
from .bundle_kernels import BODIES
from .kernel_views import KernelForm, Views
from .memory import DeviceMemory, SimError, as_dtype, poison
from .tensorrt import Arrays, Collective, Compute

Array = NDArray[Any]
_HALF = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_LARGE = 16 << 20  # bytes
_LONE = ("T", "S")  # counts of which 1 would take another product of matrices, with other bits
_STAND_INS = {"all_reduce": "AllReduce", "all_gather": "AllGather"}  # an Identity's name → what TensorRT makes of it
_SCHEMAS = {schema.name: schema for schema in (PAGED_ATTENTION, STATEFUL_SAMPLING)}
_ALIASES = {"key_cache_out": "key_cache", "value_cache_out": "value_cache", "counts_out": "counts"}
_sessions: dict[bytes, GraphSession] = {}


class GraphSession:
    """One graph of standard operators, made ready when it is first run."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._inputs, self.outputs = (
            {value.name: _counted(value) for value in values} for values in (model.graph.input, model.graph.output)
        )

    @cached_property
    def _session(self) -> Any:
        kinds = {value.type.tensor_type.elem_type for value in (*self._model.graph.input, *self._model.graph.output)}
        kinds |= {tensor.data_type for tensor in self._model.graph.initializer}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        if kinds & set(_HALF):  # casts as written: folding them away would hide what half precision does
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if onnx.TensorProto.BFLOAT16 in kinds:
            return BfloatSession(self._model, options)
        return onnxruntime.InferenceSession(self._model.SerializeToString(), options, ["CPUExecutionProvider"])

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """A lone token or row is given twice, so that it gets the bits that it gets among others."""
        lone = {symbol for name, (axis, symbol) in self._inputs.items() if symbol and feeds[name].shape[axis] == 1}
        given = {
            name: np.repeat(feeds[name], 2, axis) if symbol in lone else feeds[name]
            for name, (axis, symbol) in self._inputs.items()
        }
        found = self._session.run(list(self.outputs), given)
        return {
            name: np.take(array, [0], axis) if symbol in lone else array
            for (name, (axis, symbol)), array in zip(self.outputs.items(), found, strict=True)
        }


def session_of(model: onnx.ModelProto) -> GraphSession:
    """Graphs that are equal share a session, but for large ones, of which looking takes long."""
    if model.ByteSize() > _LARGE:
        return GraphSession(model)
    key = hashlib.sha256(model.SerializeToString(deterministic=True)).digest()
    return _sessions.setdefault(key, GraphSession(model))


def engine_compute(model: onnx.ModelProto, forms: Mapping[str, KernelForm], num_slices: int = 1) -> Compute:
    """`forms`: every kernel that operators inside may launch. `num_slices`: ranks that collectives inside join."""
    if not any(node.domain == DOMAIN or _collective(node) for node in model.graph.node):
        session = session_of(model)

        def compute(inputs: Arrays, outputs: Arrays, collective: Collective) -> None:
            for name, array in session.run(inputs).items():
                outputs[name][...] = array

        return compute
    return _in_parts(model, forms, num_slices)


def _in_parts(model: onnx.ModelProto, forms: Mapping[str, KernelForm], num_slices: int) -> Compute:
    """Segments and operators in turn, over values by name; what operators change in place is changed in place."""
    for node in model.graph.node:
        if operator := _collective(node):
            node.op_type, node.domain = operator, DOMAIN
            node.attribute.append(onnx.helper.make_attribute("group_size", num_slices))
    model.functions.extend([all_reduce_function(), all_gather_function()])  # for shapes, which a cut needs
    graph = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model))
    parts = [_part(part, graph, forms) for part in cut_at_operators(graph, ()).parts]
    outputs = [value.name for value in model.graph.output]

    def compute(inputs: Arrays, made: Arrays, collective: Collective) -> None:
        values = dict(inputs)
        for part in parts:
            part(values, collective)
        for name in outputs:
            if not np.shares_memory(made[name], values[name]):
                made[name][...] = values[name]

    return compute


Part = Callable[[dict[str, Array], Collective], None]


def _part(part: Segment | ir.Node, graph: ir.Model, forms: Mapping[str, KernelForm]) -> Part:
    if isinstance(part, Segment):
        session = session_of(segment_proto(part, [], graph.graph.opset_imports[""]))
        return lambda values, collective: values.update(session.run(values))
    if part.op_type in _STAND_INS.values():
        source, target, operator = str(part.inputs[0].name), str(part.outputs[0].name), part.op_type

        def exchange(values: dict[str, Array], collective: Collective) -> None:
            values[target] = collective(operator, values[source])

        return exchange
    return _operator(part, forms)


def _operator(node: ir.Node, forms: Mapping[str, KernelForm]) -> Part:
    """One of ours, as its plugin runs it: the launches of the step's sizes, scratch in a workspace of poison."""
    schema = _SCHEMAS[node.op_type]
    table = launch_table_from_json(node.attributes["launches"].as_string())
    actual = dict(zip((*schema.inputs, *schema.outputs), (*node.inputs, *node.outputs), strict=True))
    names = {formal: str(value.name) for formal, value in actual.items()}

    def run(values: dict[str, Array], collective: Collective) -> None:
        tensors = {formal: values[names[formal]] for formal in schema.inputs}
        tensors |= {formal: tensors[source] for formal, source in _ALIASES.items() if formal in schema.outputs}
        tensors |= {name: array for name, array in _outcomes(tensors).items() if name in schema.outputs}
        _launch(table, _sizes(node.op_type, tensors), tensors, forms)
        values.update({names[formal]: tensors[formal] for formal in schema.outputs})

    return run


def _outcomes(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """New outputs of either operator, poisoned."""
    if "q" in tensors:
        return {"out": _poisoned(tensors["q"].shape, tensors["q"].dtype)}
    rows, width = len(tensors["state_rows"]), len(tensors["logprob_slots"])
    return {
        "tokens": _poisoned((rows,), np.int32), "logprobs": _poisoned((rows,), np.float32),
        "top_ids": _poisoned((rows, width), np.int32), "top_logprobs": _poisoned((rows, width), np.float32),
    }  # fmt: skip


def _sizes(operator: str, tensors: Mapping[str, Array]) -> tuple[int, ...]:
    if operator == PAGED_ATTENTION.name:
        return len(tensors["q"]), len(tensors["query_starts"]) - 1
    return (len(tensors["logits"]),)


def _launch(
    table: LaunchTable, sizes: tuple[int, ...], tensors: dict[str, Array], forms: Mapping[str, KernelForm]
) -> None:
    step = table.steps.get(sizes)
    if step is None:
        raise SimError(f"a plugin is run with sizes {sizes}, it has launches for {sorted(table.steps)}")
    workspace = _poisoned((step.workspace_bytes,), np.uint8)
    tensors = tensors | {name: workspace[offset:] for name, offset in step.scratch.items()}
    for launch in step.launches:
        form = forms[launch.kernel]
        BODIES[form.name](_ArrayViews(form, launch.grid, tensors))


class _ArrayViews(Views):
    """A launch over arrays that are not at an address of the device."""

    def __init__(self, form: KernelForm, grid: tuple[int, int, int], tensors: Mapping[str, Array]) -> None:
        super().__init__(form, DeviceMemory(0), grid, {})
        object.__setattr__(self, "tensors", tensors)

    tensors: Mapping[str, Array]

    def __call__(self, name: str, *sizes: int) -> Array:
        kind = as_dtype(self.form.dtypes[name])
        whole = self.tensors[name].reshape(-1).view(np.uint8)
        if (num_bytes := prod(sizes) * kind.itemsize) > len(whole):
            raise SimError(f"{self.form.name}: {name} has {len(whole)} bytes, {num_bytes} are used")
        view: Array = whole[:num_bytes].view(kind).reshape(sizes)
        return view


def _collective(node: onnx.NodeProto) -> str:
    return _STAND_INS.get(node.name.rpartition("_")[0], "") if node.op_type == "Identity" else ""


def _counted(value: onnx.ValueInfoProto) -> tuple[int, str]:
    """The axis of tokens or sampled rows, and which of them it counts; "" for none."""
    dims = value.type.tensor_type.shape.dim
    return next(((axis, str(dim.dim_param)) for axis, dim in enumerate(dims) if dim.dim_param in _LONE), (0, ""))


def _poisoned(shape: tuple[int, ...], dtype: Any) -> Array:
    array = np.empty(shape, dtype)
    poison(array.reshape(-1).view(np.uint8))
    return array

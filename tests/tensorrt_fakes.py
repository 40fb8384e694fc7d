"""Fakes of what needs TensorRT's library: they record every call, and treat plugins as TensorRT does (in tests).

A network is parsed from a real ONNX file, its plugins come from the registry, and a build drives each plugin through
configuration, workspace and shape change for every profile, then keeps its fields as a plan does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import onnx

from .tensorrt_standin import real_bindings

KILOBYTE = 1024


class DimsExprs(list[Any]):
    """A list of expressions; here plain numbers stand for them."""

    def __init__(self, dims: Iterable[Any] | int = ()) -> None:
        super().__init__([None] * dims if isinstance(dims, int) else dims)


class Registry:
    """TensorRT's plugin registry: refuses a second creator of the same name, version and namespace."""

    def __init__(self) -> None:
        self.all_creators: list[Any] = []

    def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
        assert isinstance(creator, real_bindings().IPluginCreatorV3One)
        assert plugin_namespace == creator.plugin_namespace
        if any(_key(held) == _key(creator) for held in self.all_creators):
            return False
        self.all_creators.append(creator)
        return True

    def deregister_creator(self, creator: Any) -> bool:
        self.all_creators.remove(creator)
        return True


def _key(creator: Any) -> tuple[str, str, str]:
    return creator.name, creator.plugin_version, creator.plugin_namespace


_REGISTRY = Registry()  # one a process, as TensorRT's


def get_plugin_registry() -> Registry:
    return _REGISTRY


@dataclass
class Tensor:
    name: str
    shape: tuple[Any, ...]
    symbols: tuple[int | str, ...] = ()


class Layer:
    """`inputs` and `outputs` hold tensors; `plugin` is that of a plugin layer."""

    def __init__(self, name: str, kind: str, inputs: list[Any], outputs: list[Any], plugin: Any = None) -> None:
        self.name, self.kind, self.plugin = name, kind, plugin
        self.inputs, self.outputs = inputs, outputs
        self.num_ranks = 1
        self.arguments: tuple[Any, ...] = ()

    def get_input(self, index: int) -> Any:
        return self.inputs[index]

    def get_output(self, index: int) -> Any:
        return self.outputs[index]

    def set_input(self, index: int, tensor: Any) -> None:
        self.inputs[index] = tensor


class Network:
    refuses_collectives: ClassVar[bool] = False

    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.inputs: list[Tensor] = []
        self.layers: list[Layer] = []
        self.tensors: dict[str, Tensor] = {}

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_input(self, index: int) -> Tensor:
        return self.inputs[index]

    def get_layer(self, index: int) -> Layer:
        return self.layers[index]

    def add_dist_collective(self, tensor: Any, operation: Any, reduction: Any, root: Any, groups: Any) -> Layer | None:
        if self.refuses_collectives:
            return None
        made = Tensor(f"collective_{len(self.layers)}", tensor.shape, tensor.symbols)
        layer = Layer(made.name, "DIST_COLLECTIVE", [tensor], [made])
        layer.arguments = (operation, reduction, root, list(groups))
        self.layers.append(layer)
        return layer


@dataclass
class ParserError:
    text: str
    node: str

    def desc(self) -> str:
        return self.text

    def node_name(self) -> str:
        return self.node


class OnnxParser:
    """Reads inputs and nodes; a node of a foreign domain must have a creator, as in TensorRT's own parser."""

    def __init__(self, network: Network, logger: Any) -> None:
        self._network = network
        self._errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def parse_from_file(self, path: str) -> bool:
        model = onnx.load(path)  # with its external data: what is missing fails here
        functions = {(function.domain, function.name) for function in model.functions}
        network = self._network
        for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
            network.tensors[value.name] = _tensor(value)
        for tensor in model.graph.initializer:
            network.tensors[tensor.name] = Tensor(tensor.name, tuple(tensor.dims), tuple(tensor.dims))
        held = {tensor.name for tensor in model.graph.initializer}
        network.inputs = [network.tensors[value.name] for value in model.graph.input if value.name not in held]
        for node in model.graph.node:
            inputs = [network.tensors.setdefault(name, Tensor(name, ())) for name in node.input]
            outputs = [network.tensors.setdefault(name, Tensor(name, ())) for name in node.output]
            plugin = None
            if node.domain:
                if (node.domain, node.op_type) in functions:
                    self._errors.append(ParserError("read as a local function: no plugin is asked for", node.name))
                elif (creator := _creator(node)) is None:
                    self._errors.append(ParserError(f"Plugin not found: {node.op_type}", node.name))
                else:
                    fields, _held = _fields(node, creator)
                    plugin = creator.create_plugin(node.name, fields, real_bindings().TensorRTPhase.BUILD)
            network.layers.append(Layer(node.name, node.op_type, inputs, outputs, plugin))
        return not self._errors


def _tensor(value: Any) -> Tensor:
    dims = value.type.tensor_type.shape.dim
    symbols = tuple(dim.dim_param or dim.dim_value for dim in dims)
    return Tensor(value.name, tuple(-1 if isinstance(size, str) else size for size in symbols), symbols)


def _creator(node: Any) -> Any:
    given = {attribute.name: attribute.s.decode() for attribute in node.attribute}
    wanted = node.op_type, given.get("plugin_version", "1"), given.get("plugin_namespace", "")
    return next((creator for creator in _REGISTRY.all_creators if _key(creator) == wanted), None)


def _fields(node: Any, creator: Any) -> tuple[Any, list[Any]]:
    """The attributes that the creator names, in the types that TensorRT's parser gives them."""
    trt = real_bindings()
    named = {held.name for held in creator.field_names}
    kinds: dict[int, Callable[[Any], tuple[Any, Any]]] = {
        onnx.AttributeProto.INT: lambda a: (np.array([a.i], np.int32), trt.PluginFieldType.INT32),
        onnx.AttributeProto.FLOAT: lambda a: (np.array([a.f], np.float32), trt.PluginFieldType.FLOAT32),
        onnx.AttributeProto.STRING: lambda a: (np.frombuffer(a.s, np.int8), trt.PluginFieldType.CHAR),
    }
    made = [trt.PluginField(a.name, *kinds[a.type](a)) for a in node.attribute if a.name in named]
    return trt.PluginFieldCollection(made), made  # a collection holds addresses only


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[Any, Any, Any]] = {}

    def set_shape(self, name: str, lowest: Any, usual: Any, highest: Any) -> None:
        self.shapes[name] = (lowest, usual, highest)


@dataclass
class Timings:
    content: bytes

    def serialize(self) -> bytes:
        return self.content


TIMED = b"timed anew"
FOREIGN, DAMAGED = b"from another GPU", b"damaged"


@dataclass
class Config:
    """Settings as they are made; a foreign cache is refused when set, a damaged one when created."""

    flags: set[Any] = field(default_factory=set)
    preview: dict[Any, bool] = field(default_factory=dict)
    profiles: list[Profile] = field(default_factory=list)
    builder_optimization_level: int | None = None
    hardware_compatibility_level: Any = None
    profiling_verbosity: Any = None
    progress_monitor: Any = None
    timings: Timings | None = None

    def __post_init__(self) -> None:
        self.flags.add(real_bindings().BuilderFlag.TF32)  # on unless cleared

    def set_flag(self, flag: Any) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self.flags.discard(flag)

    def set_preview_feature(self, feature: Any, enable: bool) -> None:
        self.preview[feature] = enable

    def create_timing_cache(self, content: bytes) -> Timings | None:
        return None if content == DAMAGED else Timings(content)

    def set_timing_cache(self, cache: Timings, ignore_mismatch: bool) -> bool:
        if cache.content == FOREIGN and not ignore_mismatch:
            return False
        self.timings = cache
        return True

    def get_timing_cache(self) -> Timings | None:
        return self.timings

    def add_optimization_profile(self, profile: Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1


class Plan(bytes):
    @property
    def nbytes(self) -> int:
        return len(self)


class Builder:
    """`made`: every builder of this process, the last one last. `fault`: why the next one gives no engine."""

    made: ClassVar[list[Builder]] = []
    fault: ClassVar[str] = ""

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.network: Network | None = None
        self.config: Config | None = None
        if Builder.fault == "no GPU":
            severity = real_bindings().ILogger.ERROR
            logger.log(severity, "CUDA initialization failure with error: 35.")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        Builder.made.append(self)

    def create_network(self, flags: int = 0) -> Network:
        self.network = Network(flags)
        return self.network

    def create_builder_config(self) -> Config:
        self.config = Config()
        return self.config

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> Plan | None:
        trt = real_bindings()
        if Builder.fault:
            self.logger.log(trt.ILogger.ERROR, Builder.fault)
            return None
        if config.progress_monitor is not None:
            _report(config.progress_monitor)
        plugins = [layer for layer in network.layers if layer.plugin is not None]
        if plugins and not config.preview.get(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03):
            self.logger.log(trt.ILogger.ERROR, "Aliased I/O used by plugin but ALIASED_PLUGIN_IO_10_03 not enabled")
            return None
        for profile in config.profiles:
            for layer in plugins:
                _configure(layer, profile, network)
        if config.timings is not None and trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS not in config.flags:
            config.timings.content += TIMED
        content = {
            "profiles": len(config.profiles),
            "layers": [layer.name for layer in network.layers],
            "plugins": [_kept(layer.plugin) for layer in plugins],
        }
        return Plan(json.dumps(content).encode())


def _report(monitor: Any) -> None:
    """Phases as TensorRT reports them: nested, and one that ends before its last step."""
    monitor.phase_start("Building Engine", None, 3)
    monitor.phase_start("Tactics", "Building Engine", 100)
    assert monitor.step_complete("Tactics", 0) is True
    monitor.phase_finish("Tactics")
    for step in range(2):
        assert monitor.step_complete("Building Engine", step) is True
    monitor.phase_finish("Building Engine")


def _configure(layer: Layer, profile: Profile, network: Network) -> None:
    """What TensorRT asks of a plugin for one profile."""
    plugin = layer.plugin.clone()
    symbols: list[dict[str, int]] = [{}, {}, {}]
    for tensor in network.inputs:
        for place, shape in enumerate(profile.shapes[tensor.name]):
            for symbol, size in zip(tensor.symbols, shape, strict=True):
                if isinstance(symbol, str):
                    assert symbols[place].setdefault(symbol, size) == size, f"{symbol} is two sizes in one profile"
    descriptions = [_described(tensor, symbols) for tensor in (*layer.inputs, *layer.outputs)]
    inputs, outputs = descriptions[: len(layer.inputs)], descriptions[len(layer.inputs) :]
    plugin.configure_plugin(inputs, outputs)
    assert plugin.get_workspace_size(inputs, outputs) >= 0
    for tactic in plugin.get_valid_tactics():
        plugin.set_tactic(tactic)
        plugin.on_shape_change([fixed(d.opt) for d in inputs], [fixed(d.opt) for d in outputs])


def _described(tensor: Tensor, symbols: Sequence[Mapping[str, int]]) -> Any:
    assert tensor.symbols, f"{tensor.name} has no shape"
    described = real_bindings().DynamicPluginTensorDesc()
    described.min, described.opt, described.max = (
        [size if isinstance(size, int) else known[size] for size in tensor.symbols] for known in symbols
    )
    return described


def fixed(dims: Any) -> Any:
    """A description of a tensor whose size is known."""
    described = real_bindings().PluginTensorDesc()
    described.dims = dims
    return described


def _kept(plugin: Any) -> dict[str, str]:
    """A plan keeps copies of a plugin's fields, not the objects."""
    return {kept.name: bytes(np.asarray(kept.data)).hex() for kept in plugin.get_fields_to_serialize()}


class Inspector:
    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def get_engine_information(self, form: Any) -> str:
        assert form == real_bindings().LayerInformationFormat.JSON
        layers = [{"Name": name, "LayerType": "kind"} for name in self._content["layers"]]
        return json.dumps({"Layers": layers, "Bindings": []})


class Engine:
    def __init__(self, plan: bytes) -> None:
        self._content = json.loads(plan)

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        assert index < self._content["profiles"]
        return (index + 1) * KILOBYTE

    def create_engine_inspector(self) -> Inspector:
        return Inspector(self._content)


class Runtime:
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, plan: bytes) -> Engine:
        return Engine(plan)

"""What our operators share as TensorRT plugins: fields, formats, aliases, launches (offline; enqueue per capture).

An operator's choices were all made offline: a plugin carries a table of launches by sizes and replays the entry of its
step. It imports neither torch nor Triton, allocates nothing and reads nothing back from the GPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorrt as trt

from ostinato.engines.errors import BundleError, DeviceError

from .launch_table import LaunchTable, Sizes, launch_table_from_json
from .launcher import Launcher
from .operator_schema import DOMAIN, VERSION, OperatorSchema

# TensorRT knows a class by the module that defines it: a second copy under another name would be a second plugin.
assert __name__.startswith("ostinato."), f"imported as {__name__}: import ostinato.plugins.tensorrt_plugin"

NAMESPACE, PLUGIN_VERSION = DOMAIN, str(VERSION)
LAUNCHES = "launches"  # the field that holds the launch table
TACTIC = 1  # the only one: what could be tuned is in the launch table
NOT_ALIASED = -1
ALIGNMENT = 16  # bytes, of every address that a kernel is given
TYPES = {
    "float32": trt.DataType.FLOAT,
    "float16": trt.DataType.HALF,
    "bfloat16": trt.DataType.BF16,
    "int32": trt.DataType.INT32,
    "int8": trt.DataType.INT8,
}
Value = int | float | str


class OperatorPlugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):  # type: ignore[misc]
    """One node of an operator in an engine; immutable, so that clones share everything.

    `values`: the node's attributes by name. `table`: its launches. `launcher`: who launches them. `is_building`: made
    for a build, where TensorRT times plugins on inputs that it makes up: slots and tables point anywhere, so nothing
    is launched.
    """

    schema: ClassVar[OperatorSchema]
    texts: ClassVar[tuple[str, ...]]  # attributes beside the schema's: dtypes that the kernels were compiled for
    aliases: ClassVar[Mapping[str, str]]  # output → the input that it is written over

    def __init__(
        self, values: Mapping[str, Value], table: LaunchTable, launcher: Launcher, is_building: bool = False
    ) -> None:
        trt.IPluginV3.__init__(self)
        trt.IPluginV3OneCore.__init__(self)
        trt.IPluginV3OneBuildV2.__init__(self)
        trt.IPluginV3OneRuntime.__init__(self)
        self._values, self._table, self._launcher, self._is_building = dict(values), table, launcher, is_building
        self._names = (*self.schema.inputs, *self.schema.outputs)
        self._types = [TYPES[self.dtype_of(name)] for name in self._names]
        # TensorRT reads a field's memory after get_fields_to_serialize has returned: it must live as long as we do.
        self._fields = [_field(name, value) for name, value in {**self._values, LAUNCHES: table.to_json()}.items()]
        self.plugin_name, self.plugin_version, self.plugin_namespace = self.schema.name, PLUGIN_VERSION, NAMESPACE
        self.num_outputs = len(self.schema.outputs)
        self.format_combination_limit = 1
        self.metadata_string = json.dumps(self._values, sort_keys=True)
        self.timing_cache_id = hashlib.sha256((self.metadata_string + table.to_json()).encode()).hexdigest()[:16]

    def dtype_of(self, name: str) -> str:
        """The dtype of an input or output, by NumPy's name; codes of a quantized cache are "int8"."""
        raise NotImplementedError

    def sizes_of(self, inputs: Sequence[Any]) -> Sizes:
        """What tells this operator's steps apart, from its inputs' dimensions in node order."""
        raise NotImplementedError

    # TensorRT's interface from here on; names, arguments and their order are its own.

    def get_capability_interface(self, type: Any) -> OperatorPlugin:  # noqa: A002
        return self

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        return list(self._types[len(self.schema.inputs) :])

    def get_aliased_input(self, output_index: int) -> int:
        source = self.aliases.get(self.schema.outputs[output_index])
        return NOT_ALIASED if source is None else self.schema.inputs.index(source)

    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        """One combination: row-major, in the dtypes that the kernels were compiled for."""
        found = in_out[pos].desc
        return bool(found.format == trt.TensorFormat.LINEAR and found.type == self._types[pos])

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """A profile's optimum is a step that TensorRT runs while it builds: it must be a recorded one."""
        self._table.at(self.sizes_of([tensor.opt for tensor in inputs]))

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return self._table.workspace_bytes(self.sizes_of([tensor.max for tensor in inputs]))

    def get_valid_tactics(self) -> list[int]:
        return [TACTIC]

    def set_tactic(self, tactic: int) -> None:
        if tactic not in (0, TACTIC):
            raise DeviceError(
                f"TensorRT chose tactic {tactic} of {self.plugin_name}, it has {TACTIC} only: build again"
            )

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Refuse a step that is none of the recorded ones; load its kernels, since builders attach no context."""
        step = self._table.at(self.sizes_of([tensor.dims for tensor in inputs]))
        self._launcher.prepare(launch.kernel for launch in step.launches)

    def attach_to_context(self, resource_context: Any) -> OperatorPlugin:
        self._launcher.prepare(self._table.kernels)
        return self.clone()

    def clone(self) -> OperatorPlugin:
        return type(self)(self._values, self._table, self._launcher, self._is_building)

    def get_fields_to_serialize(self) -> Any:
        return trt.PluginFieldCollection(self._fields)

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Launch this step's kernels on `stream`; every pointer is an address. A raise is an error of TensorRT."""
        step = self._table.at(self.sizes_of([tensor.dims for tensor in input_desc]))
        if self._is_building:
            return
        address = dict(zip(self._names, (*inputs, *outputs), strict=True))
        for output, source in self.aliases.items():
            if address[output] != address[source]:
                raise DeviceError(
                    f"{self.plugin_name} got {output} at {address[output]:#x}, wanted it over {source} at "
                    f"{address[source]:#x}: bind both to one buffer"
                )
        address |= {name: workspace + offset for name, offset in step.scratch.items()}
        if crooked := sorted(name for name, place in address.items() if place % ALIGNMENT):
            raise DeviceError(
                f"{self.plugin_name} got {', '.join(crooked)} at no multiple of {ALIGNMENT} bytes, which its kernels "
                "count on: bind aligned memory"
            )
        for launch in step.launches:
            pointers = [address[argument] for argument in launch.arguments]
            self._launcher.launch(launch.kernel, launch.grid, pointers, stream)


class OperatorCreator(trt.IPluginCreatorV3One):  # type: ignore[misc]
    """Makes the plugins of one operator: from an ONNX node's attributes, or from the fields that an engine kept."""

    def __init__(self, plugin: type[OperatorPlugin], launcher: Launcher) -> None:
        trt.IPluginCreatorV3One.__init__(self)
        self._plugin, self._launcher = plugin, launcher
        self.name, self.plugin_version, self.plugin_namespace = plugin.schema.name, PLUGIN_VERSION, NAMESPACE
        self._kinds: dict[str, type[Value]] = {
            **{attribute.name: attribute.kind for attribute in plugin.schema.attributes},
            **dict.fromkeys((*plugin.texts, LAUNCHES), str),
        }
        self._defaults = {a.name: a.default for a in plugin.schema.attributes if a.default is not None}
        self._fields = [trt.PluginField(name, _EMPTY, _FIELD_TYPES[kind]) for name, kind in self._kinds.items()]
        self.field_names = trt.PluginFieldCollection(self._fields)

    def create_plugin(self, name: str, field_collection: Any, phase: Any) -> OperatorPlugin:
        """Both phases read the same fields. Raises BundleError if one is missing, or of another type or length."""
        given = {field.name: field for field in field_collection if field.name in self._kinds}
        if missing := sorted(set(self._kinds) - set(given) - set(self._defaults)):
            raise BundleError(f"{self.name} {name} has no {', '.join(missing)}: build the bundle again")
        values: dict[str, Value] = dict(self._defaults)
        for key, field in given.items():
            if field.type != _FIELD_TYPES[self._kinds[key]]:
                raise BundleError(
                    f"{self.name} {name} has {key} as {field.type}, wanted is {_FIELD_TYPES[self._kinds[key]]}: "
                    "build the bundle again"
                )
            values[key] = self._value(name, field)
        table = launch_table_from_json(str(values.pop(LAUNCHES)))
        return self._plugin(values, table, self._launcher, phase == trt.TensorRTPhase.BUILD)

    def _value(self, node: str, field: Any) -> Value:
        kind, data = self._kinds[field.name], np.asarray(field.data).reshape(-1)
        if kind is str:
            return data.astype(np.int8).tobytes().rstrip(b"\0").decode(errors="replace")
        if len(data) != 1:
            raise BundleError(
                f"{self.name} {node} has {len(data)} numbers as {field.name}, wanted is one: build the bundle again"
            )
        return kind(data[0])


_FIELD_TYPES: Mapping[type[Value], Any] = {
    int: trt.PluginFieldType.INT32,
    float: trt.PluginFieldType.FLOAT32,
    str: trt.PluginFieldType.CHAR,
}
_EMPTY = np.zeros(0, np.int8)


def _field(name: str, value: Value) -> Any:
    """The field and the memory behind it, kept together."""
    data: Any
    if isinstance(value, str):
        data = np.frombuffer(value.encode(), np.int8)
    else:
        data = np.array([value], np.int32 if isinstance(value, int) else np.float32)
    return trt.PluginField(name, data, _FIELD_TYPES[type(value)])

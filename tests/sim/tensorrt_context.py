"""Simulated execution contexts: what may be enqueued, when, and what a captured graph holds them to."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.engine_record import EngineTensor

from .memory import SimError, as_dtype, poison
from .timeline import Op

if TYPE_CHECKING:
    from .tensorrt import ICudaEngine, SimTensorRT

_ALIGN = 256
Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Bound:
    """A tensor as it was bound when it was enqueued."""

    name: str
    address: int
    dtype: Any
    shape: Shape


class IExecutionContext:
    """One engine's way to run; activation memory is given to it."""

    def __init__(self, engine: ICudaEngine) -> None:
        self.engine = engine
        self.active_optimization_profile = 0
        self._module: SimTensorRT = engine.module
        self._driver = engine.module.driver
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._memory = (0, 0)
        self._communicator = 0
        self._state = 0  # a number for every change that a captured graph would not survive
        self._is_settled = False  # whether it was enqueued outside a capture since its shapes changed
        self._last: tuple[int, Op | None] = (0, None)
        self._plan: tuple[_Bound, ...] | None = None

    def set_device_memory(self, memory: int, size: int) -> None:
        _check_aligned(self.engine, "activation memory", memory)
        if (memory, size) != self._memory:
            self._memory = (memory, size)
            self._state += 1

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < self.engine.num_optimization_profiles:
            return self._refuse(f"setOptimizationProfileAsync: there is no profile {profile_index}")
        if self._driver.capture_here() is not None:
            self._driver.capture_here().is_invalid = True  # type: ignore[union-attr]
            return self._refuse("setOptimizationProfileAsync: not while a stream is captured")
        if not self._driver.submit(stream_handle, "set_optimization_profile_async", _nothing):
            return self._refuse("setOptimizationProfileAsync: CUDA refused")
        self.active_optimization_profile = profile_index
        self._shapes.clear()
        self._changed()
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        tensor, wanted = self.engine.input(name), tuple(int(size) for size in shape)
        if tensor is None:
            return self._refuse(f"setInputShape: there is no input {name}")
        least, _, most = self.engine.get_tensor_profile_shape(name, self.active_optimization_profile)
        if len(wanted) != len(least) or not all(a <= b <= c for a, b, c in zip(least, wanted, most, strict=True)):
            return self._refuse(
                f"setInputShape: {name} is {list(wanted)}, profile {self.active_optimization_profile} takes "
                f"{list(least)} to {list(most)}"
            )
        if self._shapes.get(name) != wanted:
            self._shapes[name] = wanted
            self._changed()
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if not self.engine.has(name):
            return self._refuse(f"setTensorAddress: there is no tensor {name}")
        _check_aligned(self.engine, name, memory)
        self._addresses[name] = int(memory)
        self._plan = None
        return True

    def get_tensor_address(self, name: str) -> int:
        return self._addresses.get(name, 0)

    def get_tensor_shape(self, name: str) -> Shape:
        """-1 where it is not known yet."""
        for tensor in self.engine.spec.tensors:
            if tensor.name == name:
                sizes = self._sizes()
                return tuple(size if isinstance(size, int) else sizes.get(size, -1) for size in tensor.shape)
        self._refuse(f"getTensorShape: there is no tensor {name}")
        return ()

    def infer_shapes(self) -> list[str]:
        missing = self._unspecified()
        if not missing and (fault := self._contradiction()):
            raise RuntimeError(f"inferShapes: {fault}")
        return missing

    def set_communicator(self, communicator: Any) -> bool:
        if type(communicator).__name__ != "PyCapsule":
            raise TypeError("set_communicator(): incompatible function arguments: communicator is no capsule")
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        self._communicator = int(pointer(communicator, None) or 0)
        return True

    def set_aux_streams(self, aux_streams: Sequence[int]) -> None:
        for stream in aux_streams:
            self._driver.stream(stream)

    def is_stream_capturable(self, stream: int) -> bool:
        self._driver.stream(stream)
        return self._is_settled

    def update_device_memory_size_for_shapes(self) -> int:
        return self.engine.get_device_memory_size_for_profile_v2(self.active_optimization_profile)

    def execute_async_v3(self, stream_handle: int) -> bool:
        module, handle = self._module, int(stream_handle)
        module.num_enqueues += 1
        if module.num_enqueues in module.faults.refused:
            return self._refuse("enqueueV3: an error inside TensorRT")
        if self._plan is None and (fault := self._fault()):
            return self._refuse(f"enqueueV3: {fault}")
        assert self._plan is not None
        with self._driver.lock:
            stream = self._driver.stream(handle)
            is_captured = stream.capture is not None
            if is_captured and not self._is_settled:
                stream.capture.is_invalid = True  # type: ignore[union-attr]
                return self._refuse("enqueueV3: shapes have changed: enqueue once before a stream is captured")
            if not is_captured:
                self._check_order(handle, stream.last)
            if not self._driver.submit(handle, self.engine.name, self._work(is_captured), call="execute_async_v3"):
                return self._refuse("enqueueV3: CUDA refused")
            if not is_captured:
                self._is_settled = True
                self._last = module.busy[self._memory[0]] = (handle, stream.last)
        return True

    def _work(self, is_captured: bool) -> Any:
        """What runs later, over the addresses and shapes of now."""
        module, spec, memory, plan = self._module, self.engine.spec, self._memory, self._plan
        here, state, communicator = weakref.ref(self), self._state, self._communicator
        assert plan is not None
        inputs = {tensor.name for tensor in spec.inputs}

        def collective(operator: str, part: NDArray[Any]) -> NDArray[Any]:
            if module.collective is None or not communicator:
                raise SimError(f"{spec.name}: {operator} without a communicator")
            return module.collective(communicator, operator, part)

        def run() -> None:
            context = here()
            if context is None:
                raise SimError(f"{spec.name}: its context ended before its work, or its graph, was done with")
            if is_captured and context._state != state:
                raise SimError(f"{spec.name}: a graph is launched whose context has changed since: a context a graph")
            module.num_runs += 1
            if memory[1]:
                poison(module.driver.memory.bytes_at(*memory, f"{spec.name}'s activations"))
            view = module.driver.memory.view
            arrays = {one.name: view(one.address, one.dtype, one.shape, f"{spec.name}/{one.name}") for one in plan}
            given = {name: arrays[name] for name in inputs}
            made = {name: array for name, array in arrays.items() if name not in inputs}
            if module.num_runs not in module.faults.untouched:
                spec.compute(given, made, collective)
            if module.num_runs in module.faults.nan:
                _blank(made, spec.aliases)

        return run

    def _fault(self) -> str:
        """Why it can't be enqueued; "" and a plan if it can."""
        if missing := self._unspecified():
            return f"no shape was given for {', '.join(missing)}"
        if fault := self._contradiction():
            return fault
        unset = [tensor.name for tensor in self.engine.spec.tensors if not self._addresses.get(tensor.name)]
        if unset:
            return f"no address was given for {', '.join(unset)}"
        wanted = self.engine.get_device_memory_size_for_profile_v2(self.active_optimization_profile)
        if wanted and self._memory[1] < wanted:
            return f"activation memory of {self._memory[1]} bytes was given, profile needs {wanted}"
        for output, source in self.engine.spec.aliases.items():
            if self._addresses[output] != self._addresses[source]:
                return f"a plugin got {output} elsewhere than {source}, over which it writes"
        if wanted:
            self._driver.memory.block(*self._memory, f"{self.engine.name}'s activations")
        sizes = self._sizes()
        self._plan = tuple(self._bound(tensor, sizes) for tensor in self.engine.spec.tensors)
        return ""

    def _bound(self, tensor: EngineTensor, sizes: Mapping[str, int]) -> _Bound:
        shape = tuple(size if isinstance(size, int) else sizes[size] for size in tensor.shape)
        bound = _Bound(tensor.name, self._addresses[tensor.name], as_dtype(tensor.dtype), shape)
        num_bytes = int(np.prod(shape)) * bound.dtype.itemsize
        self._driver.memory.block(bound.address, num_bytes, f"{self.engine.name}/{tensor.name}")
        return bound

    def _sizes(self) -> dict[str, int]:
        """Symbol → its size, from the inputs' shapes."""
        return {
            symbol: size
            for tensor in self.engine.spec.inputs
            for symbol, size in zip(tensor.shape, self._shapes.get(tensor.name, ()), strict=False)
            if isinstance(symbol, str)
        }

    def _unspecified(self) -> list[str]:
        return [
            tensor.name
            for tensor in self.engine.spec.inputs
            if tensor.name not in self._shapes and not all(isinstance(size, int) for size in tensor.shape)
        ]

    def _contradiction(self) -> str:
        sizes = self._sizes()
        for tensor in self.engine.spec.inputs:
            for symbol, size in zip(tensor.shape, self._shapes.get(tensor.name, ()), strict=False):
                if isinstance(symbol, str) and sizes[symbol] != size:
                    return f"{tensor.name} has {size} where another input has {sizes[symbol]}"
        return ""

    def _check_order(self, stream: int, newest: Op | None) -> None:
        """What this context, or another one on its memory, has in flight must be before what comes now."""
        in_memory = self._module.busy.get(self._memory[0], (0, None)) if self._memory[1] else (0, None)
        for what, (where, op) in (("context", self._last), ("memory", in_memory)):
            if where not in (0, stream) and op is not None and not op.is_done and not _is_before(op, newest):
                raise SimError(f"{self.engine.name}: its {what} is in use on another stream")

    def _changed(self) -> None:
        self._state += 1
        self._is_settled, self._plan = False, None

    def _refuse(self, message: str) -> bool:
        self.engine.error(message)
        return False


def _check_aligned(engine: ICudaEngine, what: str, address: int) -> None:
    if int(address) % _ALIGN:
        raise SimError(f"{engine.name}: {what} at {int(address):#x} is not {_ALIGN}-byte aligned")


def _is_before(op: Op, newest: Op | None) -> bool:
    waiting, seen = [newest], set()
    while waiting:
        one = waiting.pop()
        if one is op:
            return True
        if one is not None and one not in seen:
            seen.add(one)
            waiting.extend(one.after)
    return False


def _blank(made: Mapping[str, NDArray[Any]], aliases: Mapping[str, str]) -> None:
    for name, array in made.items():
        if name not in aliases and array.dtype.kind == "f":
            array[...] = np.nan


def _nothing() -> None:
    pass

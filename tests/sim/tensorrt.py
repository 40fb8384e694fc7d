"""Simulated TensorRT over the simulated device: runtime, engines and contexts, as strict as its documentation.

Names and signatures are those of the bindings (`test_tensorrt_surface`). What TensorRT refuses with a logged error,
this does; what it leaves undefined raises `SimError`. An engine is what its bytes were registered as (`EngineSpec`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorrt_rtx as real
from numpy.typing import NDArray

from ostinato.engines.engine_record import EngineProfile, EngineTensor

from .core import RefusedError
from .driver import SimDriver
from .memory import SimError
from .tensorrt_context import IExecutionContext

STAND_IN = b"simulated engine\n"  # what the bytes of an engine begin with that are its graph

_TYPES = {
    "float32": real.DataType.FLOAT, "float16": real.DataType.HALF, "bfloat16": real.DataType.BF16,
    "int32": real.DataType.INT32, "int64": real.DataType.INT64, "int8": real.DataType.INT8,
    "uint8": real.DataType.UINT8, "bool": real.DataType.BOOL,
}  # fmt: skip
Arrays = Mapping[str, NDArray[Any]]
Collective = Callable[[str, NDArray[Any]], NDArray[Any]]  # operator, this rank's part → outcome
Compute = Callable[[Arrays, Arrays, Collective], None]  # inputs, outputs to write, how to reach the other ranks
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class EngineSpec:
    """What an engine is. `memory_bytes`: of each profile. `aliases`: output → input that must share its address."""

    name: str
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    profiles: tuple[EngineProfile, ...]
    compute: Compute
    memory_bytes: tuple[int, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[EngineTensor, ...]:
        return (*self.inputs, *self.outputs)


@dataclass
class EngineFaults:
    """What goes wrong, by number from 1. `refused`: calls of execute_async_v3, which return False.

    `untouched`: runs that write nothing; `nan`: runs whose floats are NaN. A captured enqueue runs at each launch.
    """

    refused: set[int] = field(default_factory=set)
    untouched: set[int] = field(default_factory=set)
    nan: set[int] = field(default_factory=set)


class IRuntimeConfig:
    """How a context is made."""

    def __init__(self) -> None:
        self.cuda_graph_strategy: Any = None
        self.dynamic_shapes_kernel_specialization_strategy: Any = None
        self._strategy: Any = real.ExecutionContextAllocationStrategy.STATIC

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self._strategy = strategy

    def get_execution_context_allocation_strategy(self) -> Any:
        return self._strategy


class SimTensorRT:
    """Takes the place of `tensorrt`; one a driver. `SimTensorRTRTX` has what `tensorrt_rtx` has besides."""

    __version__ = real.__version__
    ILogger = real.ILogger
    DataType = real.DataType
    TensorIOMode = real.TensorIOMode
    TensorLocation = real.TensorLocation
    ExecutionContextAllocationStrategy = real.ExecutionContextAllocationStrategy

    def __init__(self, driver: SimDriver) -> None:
        self.driver = driver
        self.faults = EngineFaults()
        self.collective: Callable[[int, str, NDArray[Any]], NDArray[Any]] | None = None  # communicator's handle first
        self.num_enqueues, self.num_runs = 0, 0
        self.busy: dict[int, tuple[int, Any]] = {}  # activation memory → the stream and the work that used it last
        self._specs: dict[bytes, EngineSpec] = {}

    def register(self, image: bytes, spec: EngineSpec) -> None:
        """From now on these bytes are that engine."""
        self._specs[hashlib.sha256(image).digest()] = spec

    def spec(self, image: bytes) -> EngineSpec | None:
        return self._specs.get(hashlib.sha256(image).digest())

    def Runtime(self, logger: Any) -> Runtime:  # noqa: N802
        return Runtime(self, logger)

    def allocates(self, what: str, logger: Any) -> bool:
        """A call that takes device memory of its own; False, with a logged error, where CUDA refuses."""
        with self.driver.lock:
            try:
                self.driver.enter(what)
            except RefusedError as refused:
                logger.log(real.ILogger.ERROR, f"{what}: CUDA refused: {refused.status.name}")
                return False
            self.driver.num_allocations += 1
            return True

    def check_config(self, engine: str, config: IRuntimeConfig) -> None:
        """What would go wrong when the context is captured."""


class SimTensorRTRTX(SimTensorRT):
    """Takes the place of `tensorrt_rtx`."""

    CudaGraphStrategy = real.CudaGraphStrategy
    DynamicShapesKernelSpecializationStrategy = real.DynamicShapesKernelSpecializationStrategy

    def check_config(self, engine: str, config: IRuntimeConfig) -> None:
        if config.cuda_graph_strategy not in (None, self.CudaGraphStrategy.DISABLED):
            raise SimError(f"{engine}: a context captures graphs of its own while we capture")


class Runtime:
    def __init__(self, module: SimTensorRT, logger: Any) -> None:
        if not isinstance(logger, real.ILogger):
            raise TypeError("__init__(): incompatible constructor arguments: logger is no ILogger")
        self.module, self.logger = module, logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        spec = self.module.spec(bytes(serialized_engine))
        if spec is None:
            self.logger.log(real.ILogger.ERROR, "deserializeCudaEngine: the plan is damaged or of another version")
            return None
        if not self.module.allocates("deserialize_cuda_engine", self.logger):
            return None
        return ICudaEngine(self, spec)


class ICudaEngine:
    """Queries, and the only way to a context."""

    num_aux_streams = 0

    def __init__(self, runtime: Runtime, spec: EngineSpec) -> None:
        self.runtime, self.spec, self.module = runtime, spec, runtime.module
        self.name = spec.name
        self.num_io_tensors = len(spec.tensors)
        self.num_optimization_profiles = len(spec.profiles)
        self.device_memory_size_v2 = max(spec.memory_bytes)
        self._by_name = {tensor.name: tensor for tensor in spec.tensors}
        self._inputs = {tensor.name for tensor in spec.inputs}

    def get_tensor_name(self, index: int) -> str:
        return self.spec.tensors[index].name

    def get_tensor_mode(self, name: str) -> Any:
        if name not in self._by_name:
            self.error(f"getTensorIOMode: there is no tensor {name}")
            return real.TensorIOMode.NONE
        return real.TensorIOMode.INPUT if name in self._inputs else real.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return _TYPES[self._by_name[name].dtype]

    def get_tensor_shape(self, name: str) -> Shape:
        return tuple(size if isinstance(size, int) else -1 for size in self._by_name[name].shape)

    def get_tensor_location(self, name: str) -> Any:
        return real.TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Shape]:
        return list(self.spec.profiles[profile_index].shapes[name])

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return self.spec.memory_bytes[profile_index]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        """None of plugins' aliases: TensorRT tells of its own operators only."""
        return None

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, runtime_config: Any = None) -> IExecutionContext | None:
        """From a configuration, or from a strategy alone."""
        config = runtime_config if isinstance(runtime_config, IRuntimeConfig) else IRuntimeConfig()
        if config is not runtime_config:
            config.set_execution_context_allocation_strategy(runtime_config)
        if (
            config.get_execution_context_allocation_strategy()
            != self.module.ExecutionContextAllocationStrategy.USER_MANAGED
        ):
            raise SimError(f"{self.name}: a context allocates activation memory of its own: ask for USER_MANAGED")
        self.module.check_config(self.name, config)
        if not self.module.allocates("create_execution_context", self.runtime.logger):
            return None
        return IExecutionContext(self)

    def input(self, name: str) -> EngineTensor | None:
        return self._by_name[name] if name in self._inputs else None

    def has(self, name: str) -> bool:
        return name in self._by_name

    def error(self, message: str) -> None:
        self.runtime.logger.log(real.ILogger.ERROR, f"[{self.name}] {message}")

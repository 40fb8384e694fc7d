"""A rank's engines under TensorRT or TensorRT-RTX: contexts made at start, enqueued when a step is put on a stream.

Contexts take the memory that they are given and all share it, since one engine runs after another. What TensorRT only
logs, and then answers False or None, is raised here with what it logged.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.engines.engine_record import EngineInfo, EngineTensor
from ostinato.engines.errors import BundleError, DeviceError
from ostinato.engines.program import StepShape

from .cuda import Stream

_MODULES = {"rtx": "tensorrt_rtx", "trt": "tensorrt"}


def load_tensorrt(target: str) -> Any:
    """The library that the target's engines need. Raises DeviceError where it is not installed or does not load."""
    try:
        return importlib.import_module(_MODULES[target])
    except (ImportError, OSError) as error:
        raise DeviceError(f"{_MODULES[target]} is not here ({error}): install ostinato[{target}]") from None


class TensorRT:
    """The library, and what it logs."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._errors: list[str] = []
        self._logger = _logger(module, self._errors)  # the runtime keeps no reference
        self._runtime = self._must("start", module.Runtime(self._logger))

    def deserialize(self, path: Path, *, may_run_host_code: bool = False) -> Any:
        """An engine. Raises BundleError with TensorRT's own reason."""
        self._errors.clear()
        if may_run_host_code:
            self._runtime.engine_host_code_allowed = True
        try:
            engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        except OSError as error:
            raise BundleError(f"{path} can't be read ({error.strerror}): build the bundle again") from None
        if engine is None:
            raise BundleError(
                f"TensorRT {self.module.__version__} does not load {path} ({self._reason()}): build the bundle again "
                "on this machine"
            )
        return engine

    def context(self, engine: Any, what: str) -> Any:
        """An execution context without memory of its own, that captures no graphs of its own."""
        self._errors.clear()
        config = self._must(f"configure {what}", engine.create_runtime_config())
        config.set_execution_context_allocation_strategy(self.module.ExecutionContextAllocationStrategy.USER_MANAGED)
        if hasattr(self.module, "CudaGraphStrategy"):  # RTX. We capture; and kernels compiled later would not be in it
            config.cuda_graph_strategy = self.module.CudaGraphStrategy.DISABLED
            eager = self.module.DynamicShapesKernelSpecializationStrategy.EAGER
            config.dynamic_shapes_kernel_specialization_strategy = eager
        return self._must(f"make a context for {what}", engine.create_execution_context(config))

    def check(self, answer: bool, what: str) -> None:
        """Raises DeviceError where TensorRT answers that it did not."""
        if not answer:
            self._must(what, None)

    def _must(self, what: str, thing: Any) -> Any:
        if thing is None:
            reason = self._reason()
            raise DeviceError(
                f"TensorRT did not {what}: {reason}: see nvidia-smi, and that the bundle fits this machine "
                "(ostinato inspect)"
            )
        return thing

    def _reason(self) -> str:
        """The first error since the last look: later ones follow from it."""
        reason = self._errors[0] if self._errors else "it gave no reason"
        self._errors.clear()
        return reason


def _logger(module: Any, errors: list[str]) -> Any:
    """TensorRT's warnings are its own affair; of what went wrong it tells only the log."""
    severe = (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR)

    class Log(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if severity in severe:
                errors.append(" ".join(msg.split()).rstrip("."))

    return Log()


class Engines:
    """A rank's engines, a context for each step shape of each. Raises BundleError or DeviceError.

    A captured graph holds its context's state, so no two share one; all share one block of memory.
    `sizes`: step shape → what the symbols in shapes stand for in it. Nothing runs before `give_memory`.
    """

    def __init__(
        self,
        tensorrt: TensorRT,
        folder: Path,
        infos: Sequence[EngineInfo],
        sizes: Mapping[StepShape, Mapping[str, int]],
        *,
        may_run_host_code: bool = False,
    ) -> None:
        self._tensorrt, self._sizes = tensorrt, sizes
        self._infos = {info.file: info for info in infos}
        self._engines: dict[str, Any] = {}
        self._contexts: dict[tuple[str, StepShape], Any] = {}
        try:
            for info in infos:
                self._load(info, folder / info.file, may_run_host_code)
        except BaseException:
            self.close()  # before the CUDA context that they live in
            raise

    def _load(self, info: EngineInfo, path: Path, may_run_host_code: bool) -> None:
        """One engine, and a context for each step shape."""
        engine = self._tensorrt.deserialize(path, may_run_host_code=may_run_host_code)
        self._engines[info.file] = engine
        _check(info, engine, path)
        for shape in self._sizes:
            self._contexts[info.file, shape] = self._tensorrt.context(engine, f"{info.file} in steps of {shape.key}")

    @property
    def num_bytes(self) -> int:
        """Device memory that the largest engine needs while it runs."""
        profiles = {(file, _profile(self._infos[file], shape)) for file, shape in self._contexts}
        return max(
            (self._engines[file].get_device_memory_size_for_profile_v2(place) for file, place in profiles), default=0
        )

    def give_memory(self, address: int, num_bytes: int, stream: Stream, communicator: int | None = None) -> None:
        """Ready every context; `communicator`: of NCCL, where engines hold collectives. The stream is waited for."""
        check = self._tensorrt.check
        for (file, shape), context in self._contexts.items():
            if num_bytes:
                context.set_device_memory(address, num_bytes)
            place = _profile(self._infos[file], shape)
            chosen = context.set_optimization_profile_async(place, stream.address)
            check(chosen, f"choose profile {place} of {file}")
            for tensor in filter(_is_dynamic, self._infos[file].inputs):
                wanted = tuple(size if isinstance(size, int) else self._sizes[shape][size] for size in tensor.shape)
                check(context.set_input_shape(tensor.name, wanted), f"take {tensor.name} as {list(wanted)} in {file}")
            if communicator is not None:
                check(context.set_communicator(_capsule(communicator)), f"join the other ranks in {file}")
        stream.wait("choosing the engines' profiles")

    def enqueue(self, file: str, shape: StepShape, addresses: Mapping[str, int], stream: Stream) -> None:
        """Put one run on the stream; `addresses`: of every tensor. It may be captured."""
        context, check = self._contexts[file, shape], self._tensorrt.check
        for tensor, address in addresses.items():
            check(context.set_tensor_address(tensor, address), f"bind {tensor} of {file}")
        check(context.execute_async_v3(stream.address), f"run {file} in a step of {shape.key}")

    def close(self) -> None:
        """Let go, contexts first; their work must be done."""
        self._contexts.clear()
        self._engines.clear()


def _profile(info: EngineInfo, shape: StepShape) -> int:
    """The number of a step shape's own profile, or of its phase's."""
    names = [profile.name for profile in info.profiles]
    return names.index(shape.key if shape.key in names else shape.phase)


def _is_dynamic(tensor: EngineTensor) -> bool:
    return any(not isinstance(size, int) for size in tensor.shape)


def _check(info: EngineInfo, engine: Any, path: Path) -> None:
    """Refuse an engine that is not what the manifest tells of: its tensors would be bound wrongly."""
    found = {engine.get_tensor_name(place) for place in range(engine.num_io_tensors)}
    wanted = {tensor.name for tensor in (*info.inputs, *info.outputs)}
    if found != wanted:
        odd = sorted(found ^ wanted)
        raise BundleError(f"{path} and the manifest differ in tensors {', '.join(odd)}: build the bundle again")
    if engine.num_optimization_profiles != len(info.profiles):
        raise BundleError(
            f"{path} has {engine.num_optimization_profiles} profiles, the manifest {len(info.profiles)}: build the "
            "bundle again"
        )


def _capsule(address: int) -> Any:
    """A pointer as TensorRT's bindings take it."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(address, None, None)

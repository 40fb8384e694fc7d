"""Loads our compiled kernels into the current CUDA context and launches them (loaded at start, launched per capture).

cuda-python is imported when the first kernel is asked for: without a driver this module imports, and then refuses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.engines.architectures import KERNEL_ARCHITECTURES
from ostinato.engines.errors import BundleError, DeviceError
from ostinato.engines.fit import kernels_run
from ostinato.engines.program import KernelInfo

WARP = 32
FOLDER = "kernels"
_FREE_SHARED_BYTES = 48 * 1024  # more than this, a function must ask for


def cuda_driver() -> Any:
    """The driver API's bindings. Raises DeviceError where they are not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(f"cuda-python is not here ({error}): install ostinato[rtx] or ostinato[trt]") from None
    return driver


class Cubins:
    """A rank's kernels for the GPU of the current context; a `plugins.launcher.Launcher`.

    `folder`: holds {sm_XX}/{name}.cubin. `kernels`: "sm_86" → name → how to launch it, as in a rank's program.
    `driver`: cuda-python's driver module, or None to import it when needed. One thread at a time.
    """

    def __init__(self, folder: Path, kernels: Mapping[str, Mapping[str, KernelInfo]], driver: Any = None) -> None:
        self._folder = folder
        self._kernels = kernels
        self._driver = driver
        self._capability = ""
        self._modules: list[Any] = []
        self._functions: dict[str, Any] = {}

    @property
    def compute_capability(self) -> str:
        """Of the GPU of the current context, such as "8.6". Raises DeviceError without one."""
        if not self._capability:
            attribute = self._api.CUdevice_attribute
            (device,) = self._call("ask for the current GPU", self._api.cuCtxGetDevice)
            (major,), (minor,) = (
                self._call("ask for the compute capability", self._api.cuDeviceGetAttribute, what, device)
                for what in (
                    attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                    attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                )
            )
            self._capability = f"{major}.{minor}"
        return self._capability

    @property
    def architecture(self) -> str:
        """Whose binaries the GPU runs, such as "sm_86": its own if they are there. Raises BundleError if none fit."""
        found = self.compute_capability
        if (own := KERNEL_ARCHITECTURES.get(found, "")) in self._kernels:
            return own
        for built_for, architecture in reversed(KERNEL_ARCHITECTURES.items()):  # the nearest below comes first
            if architecture in self._kernels and kernels_run(built_for, found):
                return architecture
        raise BundleError(
            f"the GPU has compute capability {found}, {self._folder} has kernels for "
            f"{', '.join(sorted(self._kernels)) or 'none'}: add it to the recipe's compute_capabilities and build again"
        )

    def prepare(self, kernels: Iterable[str]) -> None:
        """Load every kernel now. Raises DeviceError (GPU, driver) or BundleError (a kernel is not in the bundle)."""
        for name in kernels:
            if name not in self._functions:
                self._functions[name] = self._load(name, self._info(name))

    def launch(self, kernel: str, grid: tuple[int, int, int], pointers: Sequence[int], stream: int) -> None:
        """Launch a prepared kernel on `stream`, an address. Raises DeviceError if the driver refuses."""
        assert kernel in self._functions, f"{kernel} is launched before it is prepared"
        info = self._info(kernel)
        # Null pointers follow for what the compiler added; the driver copies all of this before it returns.
        values = (ctypes.c_void_p * (len(pointers) + info.num_hidden_pointers))(*pointers)
        places = (ctypes.c_void_p * len(values))(
            *(ctypes.addressof(values) + place * ctypes.sizeof(ctypes.c_void_p) for place in range(len(values)))
        )
        block = (info.num_warps * WARP, 1, 1)
        self._call(
            f"launch {kernel}",
            self._api.cuLaunchKernel,
            self._functions[kernel],
            *(*grid, *block, info.shared_bytes, self._api.CUstream(stream), ctypes.addressof(places), 0),
        )

    def close(self) -> None:
        """Unload everything; the kernels must have finished."""
        self._functions.clear()
        while self._modules:
            self._call("unload a kernel", self._api.cuModuleUnload, self._modules.pop())

    @property
    def _api(self) -> Any:
        if self._driver is None:
            self._driver = cuda_driver()
        return self._driver

    def _info(self, name: str) -> KernelInfo:
        built = self._kernels[self.architecture]
        if name not in built:
            raise BundleError(f"{self._folder / self.architecture} has no kernel {name}: build the bundle again")
        return built[name]

    def _load(self, name: str, info: KernelInfo) -> Any:
        path = self._folder / self.architecture / f"{name}.cubin"
        try:
            image = path.read_bytes()
        except OSError as error:
            raise BundleError(f"{path} can't be read ({error.strerror}): build the bundle again") from None
        (module,) = self._call(f"load {path}", self._api.cuModuleLoadData, image)
        self._modules.append(module)
        (function,) = self._call(f"find {info.entry}", self._api.cuModuleGetFunction, module, info.entry.encode())
        if info.shared_bytes > _FREE_SHARED_BYTES:
            self._call(
                f"give {name} {info.shared_bytes} bytes of shared memory",
                self._api.cuFuncSetAttribute,
                function,
                self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                info.shared_bytes,
            )
        return function

    def _call(self, what: str, function: Any, *arguments: Any) -> tuple[Any, ...]:
        """One driver call: its values, or a DeviceError in one line."""
        try:
            status, *values = function(*arguments)
        except RuntimeError as error:  # what cuda-python raises where no driver library is
            reason = str(error).split(". ")[0]
            raise DeviceError(f"can't {what}: {reason}: install an NVIDIA driver, or serve a bundle for cpu") from None
        if int(status):
            raise DeviceError(
                f"can't {what}: the CUDA driver returned {status.name} ({int(status)}): see nvidia-smi, and that "
                "the bundle fits this machine (ostinato inspect)"
            )
        return tuple(values)

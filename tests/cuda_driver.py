"""A stand-in for cuda-python's driver module: it records calls, and reads a launch's arguments out of memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_LAUNCH_FAILED = 719


@dataclass(frozen=True)
class Stream:
    address: int


@dataclass(frozen=True)
class Launched:
    function: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    pointers: tuple[int, ...]


@dataclass
class FakeDriver:
    """One GPU. `num_pointers`: function → how many arguments it takes, as only the cubin knows. `faults`: by call."""

    capability: tuple[int, int] = (9, 0)
    num_pointers: dict[str, int] = field(default_factory=dict)
    faults: dict[str, Status] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    launches: list[Launched] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)

    class CUdevice_attribute:  # noqa: N801 (its name in cuda-python)
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 0
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 1

    class CUfunction_attribute:  # noqa: N801
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = "max dynamic shared"

    CUstream = Stream

    def _did(self, call: str, *values: Any) -> tuple[Any, ...]:
        self.calls.append(call)
        return (self.faults.get(call, Status.CUDA_SUCCESS), *values)

    def cuCtxGetDevice(self) -> tuple[Any, ...]:  # noqa: N802
        return self._did("cuCtxGetDevice", 0)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:  # noqa: N802
        return self._did("cuDeviceGetAttribute", self.capability[attribute])

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:  # noqa: N802
        assert isinstance(image, bytes)
        return self._did("cuModuleLoadData", f"module of {image.decode()}")

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        return self._did("cuModuleGetFunction", f"{name.decode()} in {module}")

    def cuFuncSetAttribute(self, function: str, attribute: str, value: int) -> tuple[Any, ...]:  # noqa: N802
        assert attribute == self.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.shared[function] = value
        return self._did("cuFuncSetAttribute")

    def cuModuleUnload(self, module: str) -> tuple[Any, ...]:  # noqa: N802
        return self._did("cuModuleUnload")

    def cuLaunchKernel(self, function: str, *arguments: Any) -> tuple[Any, ...]:  # noqa: N802
        gx, gy, gz, bx, by, bz, shared, stream, places, extra = arguments
        assert extra == 0
        count = self.num_pointers[function]
        addresses = (ctypes.c_void_p * count).from_address(places)
        pointers = tuple(ctypes.c_void_p.from_address(address or 0).value or 0 for address in addresses)
        self.launches.append(Launched(function, (gx, gy, gz), (bx, by, bz), shared, stream.address, pointers))
        return self._did("cuLaunchKernel")

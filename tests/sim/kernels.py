"""Python in place of cubins: which function a kernel's image stands for (registered before it is loaded)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from .memory import DeviceMemory, SimError

Grid = tuple[int, int, int]
KernelBody = Callable[[DeviceMemory, Grid, tuple[int, ...]], None]  # memory, grid, pointers


@dataclass(eq=False)
class SimKernel:
    """`num_pointers`: what it takes, as only the cubin knows; `num_hidden_pointers` nulls follow.

    `shared_bytes`: how much it may have. `seconds`: how long it takes (inf: it hangs). `crashes`: it ends the context.
    """

    name: str
    body: KernelBody
    num_pointers: int
    num_hidden_pointers: int = 0
    shared_bytes: int = 48 << 10
    seconds: float = 0.0
    crashes: bool = False

    def pointers(self, places: int) -> tuple[int, ...]:
        """Read a launch's arguments, as the driver does before it returns."""
        count = self.num_pointers + self.num_hidden_pointers
        addresses = (ctypes.c_void_p * count).from_address(places)
        values = tuple(ctypes.c_void_p.from_address(address or 0).value or 0 for address in addresses)
        if any(values[self.num_pointers :]):
            raise SimError(f"{self.name}: the compiler's own pointers must be null")
        if wrong := [f"{value:#x}" for value in values if value % 16]:
            raise SimError(f"{self.name}: {', '.join(wrong)} is not 16-byte aligned")
        return values[: self.num_pointers]


class Kernels:
    """Images → kernels. An image is a cubin's bytes; where there are no cubins, its kernel's name."""

    def __init__(self) -> None:
        self._by_image: dict[bytes, SimKernel] = {}
        self.by_name: dict[str, SimKernel] = {}

    def register(self, kernel: SimKernel, image: bytes | None = None) -> SimKernel:
        self._by_image[kernel.name.encode() if image is None else image] = kernel
        self.by_name[kernel.name] = kernel
        return kernel

    def at(self, image: bytes) -> SimKernel | None:
        return self._by_image.get(image)

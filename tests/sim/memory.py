"""Simulated memory: poisoned when fresh, checked at every access, an address never given twice."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
POISON = 0x7FFF  # over and over: NaN as float16, bfloat16, float32; huge as an integer
_DEVICE_BASE, _GAP, _ALIGN = 0x7A00_0000_0000, 1 << 20, 512
_KERNEL_ALIGN = 16  # kernels are compiled for it


class SimError(AssertionError):
    """What a real device punishes only sometimes: a wrong access, a race that was lost, a handle used after its end."""


def as_dtype(kind: Any) -> np.dtype[Any]:
    """NumPy's, and by name bfloat16, which NumPy does not know."""
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    return found


def poison(where: Bytes) -> None:
    where[: len(where) // 2 * 2].view(np.uint16)[:] = POISON
    where[len(where) // 2 * 2 :] = POISON & 0xFF


@dataclass
class Block:
    """One allocation; `content` is None once freed."""

    address: int
    num_bytes: int
    content: Bytes | None
    fences: dict[int, int] = field(default_factory=dict)  # from → to


class Blocks:
    """Allocations by address."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}

    def add(self, address: int, content: Bytes) -> None:
        poison(content)
        bisect.insort(self._starts, address)
        self._blocks[address] = Block(address, len(content), content)

    def free(self, address: int) -> int:
        """Forget the content; returns how many bytes it had."""
        block = self._blocks.get(address)
        if block is None or block.content is None:
            raise SimError(f"{self._kind} memory {address:#x} is freed twice, or was never allocated")
        poison(block.content)
        block.content = None
        return block.num_bytes

    @property
    def live(self) -> list[int]:
        return [address for address, block in self._blocks.items() if block.content is not None]

    def block(self, address: int, num_bytes: int, what: str) -> Block:
        """The live block that holds all these bytes."""
        place = bisect.bisect_right(self._starts, address) - 1
        block = self._blocks[self._starts[place]] if place >= 0 else None
        if block is None or num_bytes < 0 or address + num_bytes > block.address + block.num_bytes:
            raise SimError(f"{what}: {num_bytes} bytes at {address:#x} are out of {self._kind} memory's bounds")
        if block.content is None:
            raise SimError(f"{what}: {address:#x} is used after it was freed")
        return block

    def bytes_at(self, address: int, num_bytes: int, what: str) -> Bytes:
        block = self.block(address, num_bytes, what)
        assert block.content is not None
        return block.content[address - block.address :][:num_bytes]


class DeviceMemory(Blocks):
    """What kernels and copies see of the device. Fences split a block: kernels may not reach from one into another."""

    def __init__(self, capacity: int) -> None:
        super().__init__("device")
        self.capacity = capacity
        self.used = 0
        self._next = _DEVICE_BASE

    def allocate(self, num_bytes: int) -> int | None:
        """An address, or None if there is no room."""
        if self.used + num_bytes > self.capacity:
            return None
        address, self._next = self._next, self._next + -(-(num_bytes + _GAP) // _ALIGN) * _ALIGN
        self.add(address, np.empty(num_bytes, np.uint8))
        self.used += num_bytes
        return address

    def give_back(self, address: int) -> None:
        self.used -= self.free(address)

    def fence(self, address: int, num_bytes: int) -> None:
        """From now on a kernel's access to this block must lie within one of its fences."""
        fences = self.block(address, num_bytes, "fence").fences
        fences[address] = max(fences.get(address, 0), address + num_bytes)

    def view(self, address: int, dtype: Any, shape: tuple[int, ...], what: str = "a kernel") -> NDArray[Any]:
        """A kernel's tensor, to read and write."""
        kind = as_dtype(dtype)
        num_bytes = math.prod(shape) * kind.itemsize
        if address % _KERNEL_ALIGN:
            raise SimError(f"{what}: {address:#x} is misaligned")
        block = self.block(address, num_bytes, what)
        if block.fences and not _is_fenced(block.fences, address, address + num_bytes):
            raise SimError(f"{what}: {num_bytes} bytes at {address:#x} reach out of their buffer")
        assert block.content is not None
        tensor: NDArray[Any] = block.content[address - block.address :][:num_bytes].view(kind).reshape(shape)
        return tensor


def _is_fenced(fences: Mapping[int, int], address: int, end: int) -> bool:
    return end <= fences.get(address, 0) or any(low <= address and end <= high for low, high in fences.items())


class HostMemory(Blocks):
    """Pinned memory, at its real addresses: the host reads and writes it itself. It stays mapped after it is freed."""

    def __init__(self) -> None:
        super().__init__("pinned")
        self._kept: list[Bytes] = []

    def allocate(self, num_bytes: int) -> int:
        whole = np.empty(num_bytes + _ALIGN, np.uint8)
        self._kept.append(whole)
        skip = -whole.ctypes.data % _ALIGN
        self.add(whole.ctypes.data + skip, whole[skip : skip + num_bytes])
        return int(whole.ctypes.data + skip)

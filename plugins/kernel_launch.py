"""What a launch rule gives: which Triton kernel, compiled with which constants, over which grid (offline).

Kernels take pointers only: every size, stride and choice is a constant, so a launch needs nothing of the host but
addresses, and a captured launch stays right whatever the step holds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ostinato.engines.io_table import Dim

Constant = int | float | bool | str


@dataclass(frozen=True)
class Pointer:
    """One kernel argument, by the name of the operator's input, output or scratch; 16-byte aligned.

    `dtype`: NumPy's name of the element type ("float16", "bfloat16", "float32", "int32", "uint8", "int8").
    """

    name: str
    dtype: str


@dataclass(frozen=True)
class KernelSpec:
    """What one cubin is compiled from: `function` in module `ostinato.plugins.{module}`."""

    module: str
    function: str
    pointers: tuple[Pointer, ...]
    constants: tuple[tuple[str, Constant], ...]
    num_warps: int = 4
    num_stages: int = 2

    @property
    def name(self) -> str:
        """File stem of the cubin: the function and a digest of what it is compiled with."""
        return f"{self.function}_{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Launch:
    """One launch of a step."""

    kernel: KernelSpec
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Scratch:
    """Device memory that an operator's kernels hand to each other within one call; symbols as in `engines.program`."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

"""What a kernel's body works on: its tensors by its pointers' names, and its constants (in tests)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ostinato.plugins.kernel_launch import KernelSpec

from .kernels import Grid
from .memory import DeviceMemory


class KernelForm:
    """A kernel as it was compiled. `num_blocks`: N, of every cache; `num_lines`: R, of the state."""

    def __init__(self, spec: KernelSpec, num_blocks: int, num_lines: int) -> None:
        self.spec, self.num_blocks, self.num_lines = spec, num_blocks, num_lines
        self.name = spec.function
        self.constants = dict(spec.constants)
        self.dtypes = {pointer.name: pointer.dtype for pointer in spec.pointers}


@dataclass(frozen=True)
class Views:
    """One launch. Called with a pointer's name and sizes, gives its tensor."""

    form: KernelForm
    memory: DeviceMemory
    grid: Grid
    addresses: Mapping[str, int]

    def __call__(self, name: str, *sizes: int) -> NDArray[Any]:
        form = self.form
        return self.memory.view(self.addresses[name], form.dtypes[name], sizes, f"{form.name}'s {name}")

    def __getitem__(self, constant: str) -> Any:
        return self.form.constants[constant]

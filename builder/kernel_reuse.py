"""Kernels of several ranks: slices of a stage launch the same ones, which are compiled once a build (offline)."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.engines.architectures import KERNEL_ARCHITECTURES
from ostinato.engines.program import KernelInfo
from ostinato.plugins.kernel_launch import KernelSpec

from .kernel_compiler import Compile, Kernels, compile_kernels

if TYPE_CHECKING:
    from .pipeline import Progress


class CompiledOnce:
    """Called as `compile_kernels` for one rank after another; copies what an earlier rank of this build has."""

    def __init__(self, compile_all: Compile = compile_kernels) -> None:
        self._compile = compile_all
        self._made: dict[tuple[str, str], tuple[Path, KernelInfo]] = {}  # (sm_XX, kernel) → cubin

    def __call__(
        self, specs: Iterable[KernelSpec], capabilities: Sequence[str], folder: Path, progress: Progress
    ) -> Kernels:
        archs = dict.fromkeys(KERNEL_ARCHITECTURES[capability] for capability in capabilities)
        named = {spec.name: spec for spec in specs}
        known = [name for name in named if all((arch, name) in self._made for arch in archs)]
        kernels = self._compile(
            (spec for name, spec in named.items() if name not in known), capabilities, folder, progress
        )
        for arch, by_name in kernels.items():
            for name, info in by_name.items():
                self._made[arch, name] = (folder / arch / f"{name}.cubin", info)
            for name in known:
                cubin, by_name[name] = self._made[arch, name]
                shutil.copyfile(cubin, folder / arch / cubin.name)
        return kernels

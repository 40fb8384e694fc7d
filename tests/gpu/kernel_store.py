"""Cubins for the tests, compiled once and kept on disk, so that they can be made where there is no GPU (in tests).

folder/{digest of the kernels' sources}/sm_XX/{kernel}.cubin, index.json
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.engines.architectures import KERNEL_ARCHITECTURES
from ostinato.engines.program import KernelInfo
from ostinato.plugins.kernel_launch import KernelSpec
from ostinato.plugins.source_digest import source_digest

if TYPE_CHECKING:
    from ostinato.builder.kernel_compiler import Kernels

OWN_KERNELS = Path(__file__).parent / "plain_kernels.py"
PACKAGES = {"plain_kernels": "tests.gpu"}  # module → where it is found; all others are plugins


class KernelStore:
    """`folder`: build/gpu/kernels or the like. `path` holds sm_XX/; `kernels` grows with every `add`."""

    def __init__(self, folder: Path) -> None:
        sources = source_digest() + hashlib.sha256(OWN_KERNELS.read_bytes()).hexdigest()
        self.path = folder / hashlib.sha256(sources.encode()).hexdigest()[:12]
        self.kernels: dict[str, dict[str, KernelInfo]] = {}

    def add(self, specs: Iterable[KernelSpec], capability: str) -> None:
        """Have them all, compiling what is not kept."""
        arch = KERNEL_ARCHITECTURES[capability]
        known = self.kernels.setdefault(arch, self._read(arch))
        missing = {spec.name: spec for spec in specs if spec.name not in known}
        for package in sorted({package_of(spec) for spec in missing.values()}):
            mine = [spec for spec in missing.values() if package_of(spec) == package]
            known |= self._compiled(mine, capability, package)[arch]
        if missing:
            text = json.dumps({name: asdict(info) for name, info in known.items()}, indent=1, sort_keys=True)
            (self.path / arch / "index.json").write_text(text + "\n")

    def _read(self, arch: str) -> dict[str, KernelInfo]:
        index = self.path / arch / "index.json"
        if not index.exists():
            return {}
        return {name: KernelInfo(**info) for name, info in json.loads(index.read_text()).items()}

    def _compiled(self, specs: list[KernelSpec], capability: str, package: str) -> Kernels:
        from ostinato.builder.kernel_compiler import compile_kernels

        # Tiles for short rows may spill: they are there to cross borders, not to be fast.
        self.path.mkdir(parents=True, exist_ok=True)
        return compile_kernels(specs, (capability,), self.path, Silent(), package=package, spills_allowed=True)


class Silent:
    """Progress that nobody watches."""

    def stage(self, name: str, total_bytes: int = 0) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def detail(self, text: str) -> None: ...


def package_of(spec: KernelSpec) -> str:
    """Where its module is found."""
    return PACKAGES.get(spec.module, "ostinato.plugins")

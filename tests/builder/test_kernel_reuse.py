"""Kernels that several ranks launch: compiled for the first, copied for the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ostinato.builder.kernel_reuse import CompiledOnce
from ostinato.builder.pipeline import Progress
from ostinato.engines.program import KernelInfo
from ostinato.plugins.kernel_launch import KernelSpec

from .conftest import Silent

FIRST, SECOND, THIRD = (KernelSpec("module", name, (), (("size", size),)) for size, name in enumerate("abc"))


class Compiler:
    """Writes each kernel's name as its cubin, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(
        self, specs: Iterable[KernelSpec], capabilities: Sequence[str], folder: Path, progress: Progress
    ) -> dict[str, dict[str, KernelInfo]]:
        names = [spec.name for spec in specs]
        self.asked.append(names)
        kernels: dict[str, dict[str, KernelInfo]] = {}
        for arch in (f"sm_{capability.replace('.', '')}" for capability in capabilities):
            (folder / arch).mkdir(parents=True)
            for name in names:
                (folder / arch / f"{name}.cubin").write_text(f"{arch} {name}")
            kernels[arch] = {name: KernelInfo(name, 4, 0, 2, 32, 0) for name in names}
        return kernels


def test_a_later_rank_compiles_only_what_is_new(tmp_path: Path) -> None:
    compiler = Compiler()
    once, capabilities = CompiledOnce(compiler), ("8.6", "8.9")
    one = once((FIRST, SECOND, FIRST), capabilities, tmp_path / "rank0", Silent())
    two = once((SECOND, THIRD), capabilities, tmp_path / "rank1", Silent())
    three = once((FIRST, THIRD), capabilities, tmp_path / "rank2", Silent())
    assert compiler.asked == [[FIRST.name, SECOND.name], [THIRD.name], []]
    for number, (rank, specs) in enumerate(((one, (FIRST, SECOND)), (two, (SECOND, THIRD)), (three, (FIRST, THIRD)))):
        for arch in ("sm_86", "sm_89"):
            assert set(rank[arch]) == {spec.name for spec in specs}
            for spec in specs:
                assert rank[arch][spec.name].entry == spec.name
                cubin = tmp_path / f"rank{number}" / arch / f"{spec.name}.cubin"
                assert cubin.read_text() == f"{arch} {spec.name}"

"""Compiles what the GPU tests launch, without a GPU: `python -m tests.gpu.compile_ahead 9.0` (in tests).

What it keeps in build/gpu/kernels goes to the GPU's machine with the tree, and is used there if sources are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from ostinato.plugins.kernel_launch import KernelSpec
from tests.sim.toy import SHAPES

from .cases import every_kernel
from .kernel_store import KernelStore
from .stack_program import GPU_STACK
from .toy_on_gpu import toy_launches

KEPT = Path(__file__).parent.parent.parent / "build" / "gpu" / "kernels"


def all_kernels() -> Iterator[KernelSpec]:
    yield from every_kernel()
    yield from (launch.kernel for shape in SHAPES for launch in toy_launches(shape))
    yield from (launch.kernel for launch in GPU_STACK.launches())


def main() -> None:
    store = KernelStore(KEPT)
    for capability in sys.argv[1:]:
        store.add(all_kernels(), capability)
    print(f"{sum(map(len, store.kernels.values()))} kernels in {store.path}")


if __name__ == "__main__":
    main()

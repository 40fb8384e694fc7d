"""Launches over arrays that lie on a simulated device, each in memory of exactly its size (in tests)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.plugins.kernel_launch import Launch

from .bundle_kernels import kernel_body
from .kernel_views import KernelForm, Views
from .memory import DeviceMemory

Array = NDArray[Any]


def launch_on_device(
    launches: Sequence[Launch],
    tensors: Mapping[str, Array],
    *,
    num_blocks: int = 0,
    num_lines: int = 0,
    body: Callable[[Views], None] | None = None,
    poisoned: Sequence[str] = (),
    shared: Mapping[str, str] | None = None,
) -> dict[str, Array]:
    """What the tensors hold afterwards. `poisoned`: fresh memory of that shape. `shared`: name → whose memory it is.

    `body`: what runs instead of each kernel's own.
    """
    memory = DeviceMemory(1 << 30)
    places: dict[str, int] = {}
    for name, array in tensors.items():
        address = memory.allocate(max(array.nbytes, 1))
        assert address is not None
        places[name] = address
        if name not in poisoned:
            memory.view(address, array.dtype, array.shape)[...] = array
    places |= {name: places[source] for name, source in (shared or {}).items()}
    for launch in launches:
        form = KernelForm(launch.kernel, num_blocks, num_lines)
        pointers = tuple(places[pointer.name] for pointer in launch.kernel.pointers)
        with np.errstate(all="raise", under="ignore"):
            kernel_body(form, body)(memory, launch.grid, pointers)
    return {name: memory.view(places[name], array.dtype, array.shape).copy() for name, array in tensors.items()}

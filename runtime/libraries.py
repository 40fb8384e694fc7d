"""The modules and the clock that a GPU's executor works with: the real ones unless others are given (once at start)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Libraries:
    """`driver`: cuda-python's driver module. `tensorrt`: TensorRT's or TensorRT-RTX's; `nccl`: as `runtime.nccl` takes.

    None stands for the real one, imported where it is first needed. A `tensorrt` that is given knows our operators.
    `clock`, `sleep`: seconds; bounded waits go by them.
    """

    driver: Any = None
    tensorrt: Any = None
    nccl: Any = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


REAL = Libraries()

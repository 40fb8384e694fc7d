"""What of a GPU this machine has, asked without loading anything heavy (in tests)."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from importlib.util import find_spec


@cache
def missing_device() -> str:
    """Why nothing can run on a GPU here; "" where it can."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is here (libcuda.so.1)"
    try:
        from cuda.bindings import driver
    except ImportError:
        return "cuda-python is not here: install ostinato[rtx] or ostinato[trt]"
    status, *_ = driver.cuInit(0)
    if int(status):
        return f"the NVIDIA driver does not start: cuInit returned {status.name}"
    status, count = driver.cuDeviceGetCount()
    return "" if not int(status) and count else "the NVIDIA driver sees no GPU"


@cache
def missing_torch() -> str:
    """Why torch can't compute on the GPU; "" where it can."""
    if find_spec("torch") is None:
        return "torch is not here"
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} is built without CUDA, or sees no GPU"


@cache
def found_tensorrt() -> tuple[str, ...]:
    """Targets whose TensorRT can be imported: "rtx", "trt", both or none."""
    found = []
    for target, module in (("rtx", "tensorrt_rtx"), ("trt", "tensorrt")):
        try:
            import_module(module)
        except (ImportError, OSError, RuntimeError):  # bindings without their library
            continue
        found.append(target)
    return tuple(found)

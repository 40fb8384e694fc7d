"""Whether TensorRT is here at all, asked before a checkpoint is read and a graph traced in vain (offline)."""

from __future__ import annotations

from importlib.util import find_spec

from ostinato.engines.errors import BuildError


def require_library(target: str) -> None:
    """Raises BuildError where `target` is trt and the package is not installed; loads nothing of it."""
    if target == "trt" and find_spec("tensorrt") is None:
        raise BuildError(missing_tensorrt("no module named tensorrt"))


def missing_tensorrt(reason: str) -> str:
    return (
        f"target trt needs TensorRT 11, which does not load here ({reason}): install ostinato[trt] on a machine with "
        "the GPU that is to serve, or choose target rtx, which builds without either"
    )

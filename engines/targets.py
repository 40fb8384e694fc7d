"""What each target can do: the one table that recipes, bundles and the runtime ask (read once at start)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .decoder_record import BLOCK_SIZE


@dataclass(frozen=True)
class Target:
    """`weights`, `kv_caches`: precisions that it can be built in. `compute_capabilities`: GPUs that its engines and our
    kernels can be built for; none on a CPU.

    `has_decoder`: its bundles hold a whole decoder, compiled, and a record of its arrays, in place of graphs.
    `rows_are_alike`: a row has the same bits in any company, in chunks and after a preemption.
    `block_size`: of a KV block, where its kernels know only one.
    """

    weights: tuple[str, ...]
    kv_caches: tuple[str, ...]
    compute_capabilities: tuple[str, ...] = ()
    has_decoder: bool = False
    rows_are_alike: bool = False
    block_size: int | None = None


_GPU_WEIGHTS = ("float32", "float16", "bfloat16")
_GPU_CACHES = (*_GPU_WEIGHTS, "int8", "float8_e4m3")
TARGETS: Mapping[str, Target] = {
    "cpu": Target(
        weights=("float32", "bfloat16", "int8", "int4"),
        kv_caches=("float32", "float16", "bfloat16", "int8"),
    ),
    "x86": Target(
        weights=("int8", "int4"),
        kv_caches=("int8",),
        has_decoder=True,
        rows_are_alike=True,
        block_size=BLOCK_SIZE,
    ),
    "rtx": Target(
        weights=_GPU_WEIGHTS,
        kv_caches=_GPU_CACHES,
        compute_capabilities=("8.0", "8.6", "8.9", "12.0", "12.1"),
    ),
    "trt": Target(
        weights=_GPU_WEIGHTS,
        kv_caches=_GPU_CACHES,
        compute_capabilities=("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "12.0", "12.1"),
    ),
}
GPU_TARGETS = tuple(name for name, target in TARGETS.items() if target.compute_capabilities)

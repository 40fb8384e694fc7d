"""GPUs by name: what their data sheets promise, for plans made before a build (offline).

Sources: NVIDIA's data sheets of H200, H100, A100, L4, L40S, A10, HGX B200, Jetson AGX Orin and DGX Spark (GB10); the
architecture white papers of GA102 (3090), AD102 (4090), RTX Blackwell (5090) and RTX PRO Blackwell. Memory is what the
driver reports of such a board, which is less than the name says where error correction is on. Tensor figures are dense,
with sums in float32. A link counts one direction, of NVLink where there is one, else of PCIe.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.engines.errors import RecipeError

_MIB, _GB, _TERA = 2**20, 10**9, 10**12


@dataclass(frozen=True)
class Gpu:
    """`bandwidth` and `link` in bytes/s; `half_flops` (float16, bfloat16) and `float_flops` in operations/s.

    `orin` and `gb10` share `memory_bytes` with the host.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    half_flops: float
    float_flops: float
    compute_capability: str
    link: float


def _gpu(name: str, memory_mib: int, gb_s: float, tflops: tuple[float, float], capability: str, link: float) -> Gpu:
    half, single = tflops
    return Gpu(name, memory_mib * _MIB, gb_s * _GB, half * _TERA, single * _TERA, capability, link * _GB)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", 183359, 8000, (2250, 75), "10.0", 900),
        _gpu("h200", 143771, 4800, (989, 67), "9.0", 450),
        _gpu("h100", 81559, 3350, (989, 67), "9.0", 450),
        _gpu("a100", 81920, 2039, (312, 19.5), "8.0", 300),
        _gpu("l40s", 46068, 864, (362, 91.6), "8.9", 32),
        _gpu("l4", 23034, 300, (121, 30.3), "8.9", 32),
        _gpu("a10", 23028, 600, (125, 31.2), "8.6", 32),
        _gpu("3090", 24576, 936, (71, 35.6), "8.6", 32),
        _gpu("4090", 24564, 1008, (165.2, 82.6), "8.9", 32),
        _gpu("5090", 32607, 1792, (209.5, 104.8), "12.0", 64),
        _gpu("rtx-pro-6000", 97887, 1792, (503.8, 125), "12.0", 64),
        _gpu("gb10", 122570, 273, (125, 31), "12.1", 25),
        _gpu("orin", 62841, 204.8, (42.5, 5.3), "8.7", 8),
    )
}


def gpu_named(name: str) -> Gpu:
    """Raises RecipeError for a name that the table does not hold."""
    if name.lower() not in GPUS:
        raise RecipeError(f"no GPU {name!r} is known here: give one of {', '.join(GPUS)}")
    return GPUS[name.lower()]

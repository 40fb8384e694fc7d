"""What the kernels of target `x86` need of a machine, and what this one has (offline; once at start)."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# x86-64-v4, as the kernels are compiled, and VNNI; as /proc/cpuinfo spells them.
_FLAGS = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni")
# A manifest's `hardware`: kind of processor, operating system, instructions.
KERNEL_NEEDS: Mapping[str, str] = {"machine": "x86_64", "system": "Linux", "cpu_flags": " ".join(_FLAGS)}


def find_cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """The instruction sets of the first processor; empty where the system does not tell."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def why_unfit(needs: Mapping[str, str], machine: str, system: str, cpu_flags: Iterable[str]) -> str | None:
    """What a machine lacks of `needs`, in words such as "lacks avx512_vnni"; None where it lacks nothing."""
    for key, found in (("machine", machine), ("system", system)):
        if (wanted := needs.get(key, found)) != found:
            return f"is {found or 'unknown'}, wanted is {wanted}"
    held = set(cpu_flags)
    missing = [flag for flag in needs.get("cpu_flags", "").split() if flag not in held]
    return f"lacks {', '.join(missing)}" if missing else None


def why_no_kernels() -> str | None:
    """Why the kernels of target `x86` can't run here, or None."""
    return why_unfit(KERNEL_NEEDS, platform.machine(), platform.system(), find_cpu_flags())

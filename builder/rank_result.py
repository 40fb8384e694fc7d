"""What building one rank gives besides its files: what the manifest and `inspect` tell of it (offline)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ostinato.engines.engine_record import EngineInfo


@dataclass(frozen=True)
class RankResult:
    """One rank as built.

    `weight_bytes`: bytes of weights the device will hold, each counted once. `toolchain`: package → version of what
    compiled it. `hardware`: what it needs of a machine, such as {"compute_capabilities": "8.6, 8.9"}.
    """

    weight_bytes: int
    notes: tuple[str, ...]
    toolchain: Mapping[str, str]
    hardware: Mapping[str, str]
    engines: tuple[EngineInfo, ...] = ()

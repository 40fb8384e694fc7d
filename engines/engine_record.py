"""What a bundle's manifest tells of each compiled engine: tensors, profiles, graph (written offline, read at start)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .io_table import Dim


@dataclass(frozen=True)
class EngineTensor:
    """One input or output of an engine; `shape` mixes fixed sizes and symbols, as in `engines.program`."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class EngineProfile:
    """The shapes that one optimization profile takes: input → (min, opt, max)."""

    name: str  # "decode", "prefill", or a bucket's key
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]

    def told(self) -> str:
        """min/opt/max by input, as in "hidden 1x64/4x64/8x64"."""
        return ", ".join(
            f"{name} {'/'.join('x'.join(map(str, shape)) or 'scalar' for shape in shapes)}"
            for name, shapes in sorted(self.shapes.items())
        )


@dataclass(frozen=True)
class EngineInfo:
    """One compiled plan.

    `file`: its path in the rank's folder. `version`: of the TensorRT that made it, such as "1.7.1.13". `validity`:
    what the engine's own header says of where it can run, or "" if nobody asked. `layers`: one line each, and
    `device_memory_bytes` of the largest profile; None where they are not known without a GPU. `operators`: ONNX
    operator → how often it stands in the engine's graph. `graph_digest`: SHA-256 of that graph without its weights,
    or "" if nobody kept it; two builds of one graph give different engine files, so files can't tell.
    """

    file: str
    size_bytes: int
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    profiles: tuple[EngineProfile, ...]
    version: str
    validity: str = ""
    device_memory_bytes: int | None = None
    layers: tuple[str, ...] | None = None
    operators: Mapping[str, int] = field(default_factory=dict)
    graph_digest: str = ""

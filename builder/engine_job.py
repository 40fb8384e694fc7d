"""What one engine is built from, small enough to hand to another process (offline)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ostinato.engines.engine_record import EngineInfo, EngineProfile, EngineTensor
from ostinato.engines.errors import BuildError
from ostinato.engines.sizes import Limits
from ostinato.engines.tensorrt_options import TensorRTOptions

Range = tuple[int, int, int]  # min, opt, max
Sizes = tuple[int, ...]
MIN_PREFILL_TOKENS = 16  # a shorter prefill step is padded up to it


@dataclass(frozen=True)
class EngineJob:
    """`model`: an ONNX file, its weights in a file beside it. `engine`: where the plan goes."""

    name: str
    model: Path
    engine: Path
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    profiles: tuple[EngineProfile, ...]
    options: TensorRTOptions
    compute_capabilities: tuple[str, ...]

    def record(self, size_bytes: int, version: str) -> EngineInfo:
        """The engine as built, for whoever built it to complete. `version`: of its TensorRT."""
        return EngineInfo(
            file=f"{self.engine.parent.name}/{self.engine.name}",
            size_bytes=size_bytes,
            inputs=self.inputs,
            outputs=self.outputs,
            profiles=self.profiles,
            version=version,
        )


def prefill_buckets(limits: Limits) -> tuple[int, ...]:
    """The token buckets that a prefill step is padded up to, ascending."""
    floor = min(MIN_PREFILL_TOKENS, limits.token_buckets[-1])
    return tuple(bucket for bucket in limits.token_buckets if bucket >= floor)


def step_profiles(inputs: Iterable[EngineTensor], limits: Limits) -> tuple[EngineProfile, ...]:
    """One profile for decode steps and one for prefill steps, over an engine's inputs."""
    rows, tokens = limits.row_buckets, prefill_buckets(limits)
    decode = (1, rows[len(rows) // 2], rows[-1])
    ranges: dict[str, Mapping[str, Range]] = {
        "decode": {"T": decode, "S": decode},
        "prefill": {"T": (tokens[0], tokens[-1], tokens[-1]), "S": (1, rows[-1], rows[-1])},
    }
    tensors = tuple(inputs)
    profiles = tuple(
        EngineProfile(name, {tensor.name: profile_shapes(tensor, by_symbol) for tensor in tensors})
        for name, by_symbol in ranges.items()
    )
    check_profiles(profiles)
    return profiles


def profile_shapes(tensor: EngineTensor, ranges: Mapping[str, Range]) -> tuple[Sizes, Sizes, Sizes]:
    """Min, opt and max of an input; `ranges`: of every symbol in its shape."""
    least, usual, most = (
        tuple(size if isinstance(size, int) else ranges[size][place] for size in tensor.shape) for place in range(3)
    )
    return least, usual, most


def check_profiles(profiles: Iterable[EngineProfile]) -> None:
    """Refuse a profile whose shapes are not in order, before TensorRT stumbles over it."""
    for profile in profiles:
        for name, (least, usual, most) in profile.shapes.items():
            ordered = len(least) == len(usual) == len(most) and all(
                0 < low <= middle <= high for low, middle, high in zip(least, usual, most, strict=True)
            )
            if not ordered:
                raise BuildError(
                    f"profile {profile.name}: {name} is {list(least)} to {list(most)} with {list(usual)} between: "
                    "give limits whose buckets ascend from 1"
                )

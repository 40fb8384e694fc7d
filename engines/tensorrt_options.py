"""What a recipe may ask of TensorRT, for the targets `rtx` and `trt` (offline)."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import RecipeError

ENGINE_WEIGHTS = ("inside", "stripped")
OPERATORS = ("inside", "between")
HARDWARE_COMPATIBILITY = ("none", "ampere_plus", "same_compute_capability")
_LEVELS = range(6)


@dataclass(frozen=True)
class TensorRTOptions:
    """Builder choices, all of them part of a bundle's identity.

    `engine_weights`: "inside" the engines, or "stripped": then `trt` refits engines at load, and on `rtx`, which can't
    build for that without a GPU, weights.bin holds them all and engines take them as inputs, so that layers share one.
    `operators`: our operators "inside" the engine as plugins, or "between" engine segments (`rtx` has no plugins).
    `optimization_level`: 0 to 5, more tactics the higher; None leaves TensorRT's default.
    `timing_cache`: a file, held to `timing_cache_sha256`; `trt` only, since it makes TensorRT-RTX look for a GPU.
    """

    engine_weights: str = "inside"
    operators: str = "between"
    optimization_level: int | None = None
    weight_streaming: bool = False
    refit: bool = False
    version_compatible: bool = False
    hardware_compatibility: str = "none"
    timing_cache: str = ""
    timing_cache_sha256: str = ""

    def __post_init__(self) -> None:
        for key, value, known in (
            ("engine_weights", self.engine_weights, ENGINE_WEIGHTS),
            ("operators", self.operators, OPERATORS),
            ("hardware_compatibility", self.hardware_compatibility, HARDWARE_COMPATIBILITY),
        ):
            if value not in known:
                raise RecipeError(f"tensorrt.{key} is {value!r}: give one of {', '.join(known)}")
        if self.optimization_level is not None and self.optimization_level not in _LEVELS:
            raise RecipeError(f"tensorrt.optimization_level is {self.optimization_level}: give 0 to {_LEVELS[-1]}")
        if self.timing_cache and not self.timing_cache_sha256:
            raise RecipeError("tensorrt.timing_cache has no timing_cache_sha256: pin it, so that builds repeat")
        if self.timing_cache_sha256 and not self.timing_cache:
            raise RecipeError("tensorrt.timing_cache_sha256 stands without timing_cache: name the file, or drop it")


PLAIN = TensorRTOptions()

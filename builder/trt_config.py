"""A recipe's TensorRT options as a builder configuration: flags, profiles, timing cache (offline)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorrt as trt

from ostinato.engines.engine_record import EngineProfile
from ostinato.engines.errors import BuildError
from ostinato.engines.tensorrt_options import TensorRTOptions

from .timing_cache import TimingCache

_HARDWARE = {
    "none": trt.HardwareCompatibilityLevel.NONE,
    "ampere_plus": trt.HardwareCompatibilityLevel.AMPERE_PLUS,
    "same_compute_capability": trt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY,
}


def set_options(config: Any, options: TensorRTOptions, has_plugins: bool) -> None:
    """Set what the recipe asks for, and what our graphs always need."""
    # float32 in a recipe means it, and half precision has no float32 product that TF32 could speed up
    config.clear_flag(trt.BuilderFlag.TF32)
    config.set_flag(trt.BuilderFlag.EDITABLE_TIMING_CACHE)
    for wanted, which in (
        (options.refit, trt.BuilderFlag.REFIT),
        (options.engine_weights == "stripped", trt.BuilderFlag.STRIP_PLAN),
        # the weights come back as they were, so the builder may still rely on their values
        (options.engine_weights == "stripped" and not options.refit, trt.BuilderFlag.REFIT_IDENTICAL),
        (options.weight_streaming, trt.BuilderFlag.WEIGHT_STREAMING),
        (options.version_compatible, trt.BuilderFlag.VERSION_COMPATIBLE),
    ):
        if wanted:
            config.set_flag(which)
    if has_plugins:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    config.hardware_compatibility_level = _HARDWARE[options.hardware_compatibility]
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for the inspector's dump


def use_timing_cache(config: Any, cache: TimingCache) -> str | None:
    """Give the configuration a timing cache; one that TensorRT won't take is rebuilt, and a note says so."""
    if cache.content:
        held = config.create_timing_cache(cache.content)
        if held is not None and config.set_timing_cache(held, False):
            if cache.is_pinned:
                config.set_flag(trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)
            return None
    empty = config.create_timing_cache(b"")
    if empty is None or not config.set_timing_cache(empty, False):
        raise BuildError("TensorRT takes no timing cache, not even an empty one: reinstall tensorrt-cu13")
    if not cache.content:
        return None
    return (
        "the timing cache is damaged, or from another GPU or TensorRT: every tactic was timed again, so this build may "
        "differ from the last one; pin the new cache"
    )


def add_profiles(builder: Any, config: Any, network: Any, profiles: Sequence[EngineProfile]) -> None:
    """Add every profile, in order; each must give all inputs of unknown size, and min ≤ opt ≤ max of each."""
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    for index, given in enumerate(profiles):
        profile = builder.create_optimization_profile()
        for tensor in inputs:
            lowest, usual, highest = _shapes(given, tensor)
            profile.set_shape(tensor.name, lowest, usual, highest)
        if config.add_optimization_profile(profile) != index:
            raise BuildError(f"TensorRT refuses profile {given.name}: check the limits of the recipe")


def _shapes(given: EngineProfile, tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    if tensor.name not in given.shapes:
        raise BuildError(f"profile {given.name} gives no shape of input {tensor.name}: builder and graph disagree")
    lowest, usual, highest = given.shapes[tensor.name]
    graph = tuple(tensor.shape)
    fits = len(lowest) == len(usual) == len(highest) == len(graph) and all(
        low <= mid <= high and size in (-1, mid) and (size == -1 or low == high)
        for low, mid, high, size in zip(lowest, usual, highest, graph, strict=True)
    )
    if not fits:
        raise BuildError(
            f"profile {given.name} gives {tensor.name} as {lowest} ≤ {usual} ≤ {highest}, the graph has {graph}: "
            "check the limits of the recipe"
        )
    return lowest, usual, highest

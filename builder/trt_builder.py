"""Compiles one graph into one TensorRT engine, on the GPU that is to run it (offline).

ONNX ─ parse ─▶ network ─ plugins, collectives ─┐
recipe ─▶ configuration, profiles, timing cache ┴─▶ plan file, timing cache, inspector's dump
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorrt as trt

from ostinato.engines.errors import BuildError, DeviceError
from ostinato.plugins.launcher import Launcher
from ostinato.plugins.plugin_registry import register_plugins

from .engine_job import EngineJob
from .timing_cache import TimingCache
from .trt_collective import Collective
from .trt_config import add_profiles, set_options, use_timing_cache
from .trt_journal import Journal, PhaseProgress
from .trt_network import parse_network

_MAJOR = "11"


@dataclass(frozen=True)
class BuiltEngine:
    """`device_memory_bytes`: of each profile, in order. `layers`: the inspector's, as JSON text."""

    size_bytes: int
    version: str
    device_memory_bytes: tuple[int, ...]
    layers: str
    timing_cache: bytes
    notes: tuple[str, ...]

    @property
    def layer_lines(self) -> tuple[str, ...]:
        """One line a layer; TensorRT gives a record or, for an engine of low verbosity, a name."""
        found = json.loads(self.layers).get("Layers", [])
        return tuple(
            layer if isinstance(layer, str) else f"{layer.get('LayerType', '?')} {layer.get('Name', '?')}"
            for layer in found
        )


class TensorRTBuilder:
    """TensorRT, started: it holds the GPU from here on. Raises DeviceError or BuildError if there is none."""

    def __init__(self) -> None:
        if trt.__version__.split(".")[0] != _MAJOR:
            raise BuildError(f"TensorRT here is {trt.__version__}, wanted is {_MAJOR}.x: install tensorrt-cu13 11.4")
        self._journal = Journal()
        try:
            self._builder = trt.Builder(self._journal)
        except TypeError:  # the bindings' way to say that the library gave no builder
            raise DeviceError(
                f"TensorRT {trt.__version__} can't start ({self._journal.reason}): build on the GPU that is to serve, "
                "or choose target rtx, which builds without one"
            ) from None

    @property
    def version(self) -> str:
        return str(trt.__version__)

    def build(
        self,
        job: EngineJob,
        collectives: Mapping[str, Collective],
        launcher: Launcher | None,
        cache: TimingCache,
        heard: Callable[[str], None],
    ) -> BuiltEngine:
        """Write `job.engine`. Raises BuildError with TensorRT's own last words.

        `collectives`: by the name of the node that stands for each. `launcher`: of the kernels of the engine's
        plugins, or None if it has none. `heard` is told how far TensorRT is, from any thread.
        """
        # TensorRT keeps no reference to creators, monitor or cache: these names must outlive the build
        creators = register_plugins(trt.get_plugin_registry(), launcher) if launcher else ()
        monitor = PhaseProgress(job.name, heard)
        network = parse_network(self._builder, job, collectives, self._journal)
        config = self._builder.create_builder_config()
        set_options(config, job.options, has_plugins=bool(creators))
        note = use_timing_cache(config, cache)
        add_profiles(self._builder, config, network, job.profiles)
        config.progress_monitor = monitor
        plan = self._builder.build_serialized_network(network, config)
        if plan is None:
            raise BuildError(self._refusal(job, is_pinned=cache.is_pinned and note is None))
        job.engine.write_bytes(plan)
        timings = bytes(config.get_timing_cache().serialize())
        memory, layers = self._inspect(plan, len(job.profiles))
        return BuiltEngine(plan.nbytes, self.version, memory, layers, timings, (note,) if note else ())

    def _inspect(self, plan: Any, num_profiles: int) -> tuple[tuple[int, ...], str]:
        engine = trt.Runtime(self._journal).deserialize_cuda_engine(plan)
        if engine is None:
            raise BuildError(f"TensorRT can't load the engine that it just built ({self._journal.reason}): report it")
        memory = tuple(engine.get_device_memory_size_for_profile_v2(index) for index in range(num_profiles))
        layers = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
        return memory, layers

    def _refusal(self, job: EngineJob, is_pinned: bool) -> str:
        advice = "see that GPU memory is free"
        if is_pinned:
            advice = "drop tensorrt.timing_cache to time what the pinned cache lacks, then pin the new one"
        return f"{job.name}: TensorRT {self.version} built no engine ({self._journal.reason}): {advice}"

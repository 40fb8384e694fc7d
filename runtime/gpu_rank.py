"""All that one rank has on its GPU: memory, kernels, engines, graphs (made at start, given back at the end)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ostinato.engines.bundle import Bundle
from ostinato.engines.errors import BundleError, DeviceError
from ostinato.engines.fit import check_fit
from ostinato.engines.manifest import Manifest
from ostinato.engines.program import Program, StepShape
from ostinato.engines.shards import Shards
from ostinato.engines.sizes import Limits
from ostinato.plugins.cubin import FOLDER, Cubins

from .buffers import StepBuffers
from .cuda import WAIT_LIMIT_S, Device
from .device_weights import upload_weights
from .executor import StepRules
from .graphs import Graphs
from .libraries import Libraries
from .links import Links
from .machine import find_machine
from .progress import Show
from .rank_program import RankProgram, kernels_of
from .state_lines import StateLines
from .step_inputs import StepInputs, StepShapes
from .step_layout import step_layout, symbols
from .trt import Engines, TensorRT, load_tensorrt

_WEIGHTS = "weights.bin"

logger = logging.getLogger(__name__)


class GpuRank:
    """One rank of a bundle on GPU number `rank`, ready to run steps. Raises BundleError or DeviceError.

    `stream` has all of a step's work; `side_stream` what may overtake it. `inputs`: for each slot, step shape → its
    arrays. From when this is made on, nothing is allocated on the device.
    """

    def __init__(
        self,
        bundle: Bundle,
        limits: Limits,
        rank: int,
        libraries: Libraries,
        links: Links | None,
        is_strict: bool,
        progress: Show,
    ) -> None:
        manifest = bundle.manifest
        check_fit(manifest, find_machine(manifest.target, libraries, rank))
        _refuse(manifest)
        program = bundle.program(rank)
        self.shapes = StepShapes(program.step_shapes, limits)
        self.rules = step_rules(manifest.shards, limits, self.shapes)
        program = replace(program, step_shapes=self.shapes.needed)
        self._folder, self._infos = bundle.rank_dir(rank), manifest.engines[rank]
        self._manifest, self._libraries, self._links = manifest, libraries, links
        self._cubins: Cubins | None = None
        self._engines: Engines | None = None
        self.device = Device(rank, libraries.driver, clock=libraries.clock, sleep=libraries.sleep)
        try:
            self._open(program, device_limits(manifest, limits), is_strict, progress)
        except BaseException:
            with suppress(DeviceError):  # what went wrong first is what to tell
                self.close()
            raise

    def _open(self, program: Program, limits: Limits, is_strict: bool, progress: Show) -> None:
        sizes = {shape: symbols(shape, limits, self._manifest.sizes) for shape in program.step_shapes}
        layout = step_layout(program, limits, self._manifest.sizes)
        self.stream, self.side_stream = self.device.stream(), self.device.stream()
        self.masks_may_go_up, self.masks_are_up = self.device.event(), self.device.event()
        self._cubins = Cubins(self._folder / FOLDER, program.kernels, self._libraries.driver)
        self._cubins.prepare(kernels_of(program, program.step_shapes))
        self._engines = self._load_engines(self._cubins, sizes, progress)
        engine_bytes = self._engines.num_bytes
        self.buffers = StepBuffers(self.device, layout, engine_bytes=engine_bytes, num_slots=self.rules.num_in_flight)
        self.inputs = [
            {shape: StepInputs(slot.fill(shape), slot.plain(shape)) for shape in program.step_shapes}
            for slot in self.buffers.slots
        ]
        self.lines = StateLines(self.device, self.buffers)
        upload_weights(self._folder / _WEIGHTS, self.buffers, self.stream, progress)
        self.buffers.clear(self.stream)
        self._engines.give_memory(self.buffers.address("engine"), engine_bytes, self.stream, self._communicator())
        self.program = RankProgram(program, self.buffers, self._cubins, self._engines, self._links, sizes)
        self.graphs = Graphs(self.stream, self.program.record, parts=tuple(self.program.parts), is_strict=is_strict)
        self.graphs.capture(program.step_shapes, progress)
        self.stream.wait("getting ready")
        self.device.seal()
        taken = self.graphs.memory
        logger.info("graphs of %d step shapes take %.1f MiB", len(taken), sum(taken.values()) / 2**20)
        for key, reason in self.graphs.failures.items():
            logger.warning("%s is not captured, its steps run eagerly, which is slower: %s", key, reason)

    def _load_engines(self, cubins: Cubins, sizes: Mapping[StepShape, Mapping[str, int]], progress: Show) -> Engines:
        progress("load engines", 0, 1)
        module = self._libraries.tensorrt
        if module is None:
            module = load_tensorrt(self._manifest.target)
            if is_inside(self._manifest):
                self._creators = _register(module, cubins)
        may_run = self._manifest.tensorrt.version_compatible
        engines = Engines(TensorRT(module), self._folder, self._infos, sizes, may_run_host_code=may_run)
        progress("load engines", 1, 1)
        return engines

    def _communicator(self) -> int | None:
        """What engines with collectives in them are handed."""
        has_collectives = is_inside(self._manifest) and self._manifest.shards.tensor_parallel > 1
        return self._links.communicator if has_collectives and self._links is not None else None

    def close(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Give everything back; again does nothing, or what an error kept it from. Raises DeviceError."""
        if self.device.is_closed:
            return
        with suppress(DeviceError):  # of a context that is lost
            self.device.make_current()
        self.device.drain(limit_s)
        try:
            if self._engines is not None:
                self._engines.close()
            if self._cubins is not None:
                self._cubins.close()
        finally:
            self.device.close(limit_s)


def step_rules(shards: Shards, limits: Limits, shapes: StepShapes) -> StepRules:
    """Two steps in flight, the second fed by the first; with stages, one for each, whose tokens come back first."""
    stages = shards.pipeline_parallel
    return StepRules(
        pad_tokens=(0,) * (limits.max_rows + 1),
        computed_tokens=shapes.computed_tokens,
        num_in_flight=max(2, stages),
        feeds_tokens=stages == 1,
        keeps_state=True,
    )


def is_inside(manifest: Manifest) -> bool:
    """Whether our operators stand inside the engine."""
    return manifest.target == "trt" and manifest.tensorrt.operators == "inside"


def device_limits(manifest: Manifest, limits: Limits) -> Limits:
    """What memory is laid out by: as built, but that fewer or more KV blocks do where no engine holds the cache."""
    built = manifest.limits
    if is_inside(manifest):
        return built
    return replace(built, kv_tokens=limits.kv_tokens, max_context=min(built.max_context, limits.kv_tokens))


def _refuse(manifest: Manifest) -> None:
    if manifest.target == "trt" and manifest.tensorrt.engine_weights == "stripped":
        raise BundleError(
            "the bundle's engines have no weights (tensorrt.engine_weights stripped), and this version does not refit "
            "them: build it with engine_weights inside"
        )


def _register(module: Any, cubins: Cubins) -> tuple[Any, ...]:
    """Make our operators known, before an engine that holds them is loaded."""
    from ostinato.plugins.plugin_registry import register_plugins  # needs TensorRT to be there

    return register_plugins(module.get_plugin_registry(), cubins)

"""One segment to one TensorRT-RTX engine, on any machine, with or without a GPU (offline).

The only file that imports TensorRT-RTX; it runs in a process of its own (see `engine_process`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorrt_rtx as trt

from ostinato.engines.engine_record import EngineInfo
from ostinato.engines.errors import BuildError
from ostinato.engines.tensorrt_options import TensorRTOptions

from .engine_job import EngineJob, check_profiles

VERSION: str = trt.__version__
_NO_DRIVER = "sound header; where it runs shows on a machine with a GPU"
_UNSOUND = (trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE, trt.EngineInvalidityDiagnostics.VERSION_MISMATCH)

Watch = Callable[[str, int, int], bool]  # phase, step, steps → whether to go on


class _Log(trt.ILogger):  # type: ignore[misc]
    """Keeps what TensorRT calls an error, and drops the rest."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.ERROR:
            self.errors.append(message.strip())

    def first(self) -> str:
        return self.errors[0] if self.errors else "it gave no reason"


class _Monitor(trt.IProgressMonitor):  # type: ignore[misc]
    """Tells the watcher of every step, and TensorRT to stop when the watcher says so."""

    def __init__(self, watch: Watch) -> None:
        trt.IProgressMonitor.__init__(self)
        self._watch = watch
        self._steps: dict[str, int] = {}
        self.is_cancelled = False

    def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
        self._steps[phase] = num_steps
        self._ask(phase, 0)

    def phase_finish(self, phase: str) -> None:
        self._steps.pop(phase, None)

    def step_complete(self, phase: str, step: int) -> bool:
        return self._ask(phase, step + 1)

    def _ask(self, phase: str, step: int) -> bool:
        self.is_cancelled |= not self._watch(phase, step, self._steps.get(phase, 0))
        return not self.is_cancelled


def build_engine(job: EngineJob, watch: Watch) -> EngineInfo:
    """Build the engine and write its file. Raises BuildError; one that `watch` stopped says that it was cancelled."""
    check_profiles(job.profiles)
    log = _Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    _parse(job, network, log)
    config = builder.create_builder_config()
    _configure(config, job.options, job.compute_capabilities)
    for profile in job.profiles:
        shapes = builder.create_optimization_profile()
        for name, (least, usual, most) in profile.shapes.items():
            shapes.set_shape(name, least, usual, most)
        if config.add_optimization_profile(shapes) < 0:
            raise BuildError(f"{job.name}: TensorRT-RTX refuses the profile {profile.name}: {log.first()}")
    monitor = _Monitor(watch)
    config.progress_monitor = monitor
    layers = tuple(f"{layer.type.name} {layer.name}" for layer in map(network.get_layer, range(network.num_layers)))
    plan = builder.build_serialized_network(network, config)
    if monitor.is_cancelled:
        raise BuildError(f"{job.name}: cancelled")
    if plan is None:
        raise BuildError(f"{job.name}: TensorRT-RTX {VERSION} can't build it: {log.first()}{_hint(job.options)}")
    job.engine.write_bytes(plan)
    return replace(job.record(plan.nbytes, VERSION), validity=_validity(job, plan), layers=layers)


def _parse(job: EngineJob, network: Any, log: _Log) -> None:
    """Fill the network from the ONNX file; only this segment's weights are read."""
    parser = trt.OnnxParser(network, log)
    if parser.parse_from_file(str(job.model)):
        return
    faults = [parser.get_error(index) for index in range(parser.num_errors)]
    told = "; ".join(f"node {f.node_name() or f.node()} ({f.node_operator()}): {f.desc()}" for f in faults)
    raise BuildError(f"{job.name}: TensorRT-RTX {VERSION} can't read the graph: {told or log.first()}")


def _configure(config: Any, options: TensorRTOptions, compute_capabilities: tuple[str, ...]) -> None:
    config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # without it an engine can't be captured
    if options.refit:
        config.set_flag(trt.BuilderFlag.REFIT)
    if options.version_compatible:  # the package has no lean runtime to put inside
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    config.num_compute_capabilities = len(compute_capabilities)
    for index, capability in enumerate(compute_capabilities):
        known = trt.ComputeCapability.__members__.get(f"SM{capability.replace('.', '')}")
        if known is None or not config.set_compute_capability(known, index):
            raise BuildError(f"TensorRT-RTX {VERSION} builds nothing for compute capability {capability}: drop it")


def _hint(options: TensorRTOptions) -> str:
    if not options.refit:
        return ""
    return " (tensorrt.refit needs a GPU here: build on one, or drop it; engine_weights 'stripped' needs none)"


def _validity(job: EngineJob, plan: Any) -> str:
    """What the engine's own header says. Without a driver it can be read, but not held against a GPU."""
    log = _Log()
    validity, diagnostics = trt.Runtime(log).get_engine_validity(plan)
    found = [flag for flag in trt.EngineInvalidityDiagnostics.__members__.values() if diagnostics & int(flag)]
    if any(flag in _UNSOUND for flag in found):
        raise BuildError(
            f"{job.name}: the engine's header is unsound ({', '.join(f.name for f in found)}): build again"
        )
    if validity == trt.EngineValidity.INVALID and not found:
        return _NO_DRIVER
    return ", ".join([validity.name.lower(), *(flag.name.lower() for flag in found)])

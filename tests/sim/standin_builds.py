"""GPU-shaped bundles without TensorRT and Triton: the builder's own path, with stand-ins for what takes a compiler.

A stand-in engine's bytes are the graph that it was built from, weights inside; a stand-in cubin's are its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import onnx

from ostinato.builder import kernel_reuse, pipeline, rank_graph, rtx, trt
from ostinato.builder.engine_job import EngineJob
from ostinato.engines.architectures import KERNEL_ARCHITECTURES
from ostinato.engines.bundle import Bundle
from ostinato.engines.engine_record import EngineInfo
from ostinato.engines.program import KernelInfo
from ostinato.engines.recipe import Recipe
from ostinato.engines.shards import ONE_RANK, Shards
from ostinato.engines.sizes import Limits
from ostinato.engines.tensorrt_options import TensorRTOptions
from ostinato.plugins.kernel_launch import KernelSpec
from ostinato.runtime.cuda import Device

from ..builder.conftest import Silent
from ..tiny import write_tiny
from .driver import SimDriver
from .tensorrt import STAND_IN, SimTensorRT
from .traces import kept_stage

HIDDEN_POINTERS = 2  # of every stand-in cubin
TINY_LIMITS = Limits(
    block_size=8, max_rows=8, max_step_tokens=64, max_context=96, kv_tokens=512, row_buckets=(1, 2, 4, 8),
    token_buckets=(1, 2, 4, 8, 16, 32, 64),
)  # fmt: skip
_MEMORY = 4096  # bytes of activations of the first profile


def stand_in_kernels(
    specs: Iterable[KernelSpec], capabilities: Sequence[str], folder: Path, progress: Any
) -> dict[str, dict[str, KernelInfo]]:
    """Takes the place of `kernel_compiler.compile_kernels`."""
    infos = {spec.name: KernelInfo(spec.function, spec.num_warps, 0, HIDDEN_POINTERS, 32, 0) for spec in specs}
    architectures = [KERNEL_ARCHITECTURES[capability] for capability in capabilities]
    for architecture in architectures:
        (folder / architecture).mkdir(parents=True)
        for name in infos:
            (folder / architecture / f"{name}.cubin").write_bytes(name.encode())
    return {architecture: dict(infos) for architecture in architectures}


def write_engine(job: EngineJob) -> int:
    """The job's graph, with its weights, as an engine; returns its bytes."""
    content = STAND_IN + onnx.load(job.model).SerializeToString(deterministic=True)
    return job.engine.write_bytes(content)


class StandInProcess:
    """Takes the place of `EngineProcess`."""

    def __init__(self, max_memory: int | None = None) -> None: ...

    def __enter__(self) -> StandInProcess:
        return self

    def __exit__(self, *error: object) -> None: ...

    def build(self, job: EngineJob, weight_bytes: int, heard: Callable[[str, int, int], None]) -> EngineInfo:
        return EngineInfo(
            file=f"{job.engine.parent.name}/{job.engine.name}",
            size_bytes=write_engine(job),
            inputs=job.inputs,
            outputs=job.outputs,
            profiles=job.profiles,
            version=SimTensorRT.__version__,
            validity="valid",
            layers=("Simulated",),
        )


class _BuiltEngine:
    """As `trt_builder.BuiltEngine`, whose module wants TensorRT."""

    def __init__(self, job: EngineJob) -> None:
        self.size_bytes = write_engine(job)
        self.version = SimTensorRT.__version__
        self.device_memory_bytes = tuple(_MEMORY * (1 + place) for place in range(len(job.profiles)))
        self.layers, self.layer_lines = '{"Layers": []}', ("Simulated",)
        self.timing_cache, self.notes = b"", ()


class StandInBuilder:
    """Takes the place of `TensorRTBuilder`."""

    version = SimTensorRT.__version__

    def build(self, job: EngineJob, *others: Any) -> Any:
        return _BuiltEngine(job)


@contextmanager
def stand_ins(capability: tuple[int, int]) -> Iterator[None]:
    """While it lasts, builds for GPU targets take no compiler; the machine has a GPU of that kind."""
    driver = SimDriver()
    driver.capability = capability
    device = Device(driver=driver)
    with (
        mock.patch.object(kernel_reuse.CompiledOnce.__init__, "__defaults__", (stand_in_kernels,)),
        mock.patch.object(rank_graph, "stage_onnx", kept_stage),
        mock.patch.object(rtx, "EngineProcess", StandInProcess),
        mock.patch.object(rtx, "version", return_value=SimTensorRT.__version__),
        mock.patch.object(trt, "_start", StandInBuilder),
        mock.patch.object(trt, "version", return_value=SimTensorRT.__version__),
        mock.patch.object(pipeline, "require_library"),
        mock.patch("ostinato.plugins.cubin.cuda_driver", return_value=driver),
    ):
        yield
    device.close()


def build_simulated(recipe: Recipe, out: Path, capability: tuple[int, int] = (12, 0), progress: Any = None) -> Bundle:
    """`pipeline.build` with stand-ins; `recipe` asks for rtx or trt."""
    with stand_ins(capability):
        return pipeline.build(recipe, out, progress or Silent()).bundle


def tiny_bundle(
    folder: Path,
    target: str = "rtx",
    *,
    model: str = "llama",
    overrides: Mapping[str, Any] | None = None,
    limits: Limits = TINY_LIMITS,
    shards: Shards = ONE_RANK,
    options: TensorRTOptions | None = None,
    weights: str = "float32",
) -> Bundle:
    """A bundle of a tiny random model at `folder`/bundle, its checkpoint beside it.

    `target`: "rtx" (operators between engines) or "trt" (inside one, unless `options` say otherwise).
    """
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        write_tiny(checkpoint, model, **(overrides or {}))
    inside = TensorRTOptions(operators="inside" if target == "trt" else "between")
    recipe = Recipe(
        "tiny", str(checkpoint), target, weights, weights, limits, compute_capabilities=("12.0",), shards=shards,
        tensorrt=options or inside,
    )  # fmt: skip
    return build_simulated(recipe, folder / "bundle")

"""One rank for TensorRT-RTX: a real engine a segment, our kernels, and the program that runs them in turn (offline)."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from ostinato.engines.engine_record import EngineInfo
from ostinato.engines.program import FILE_NAME
from ostinato.engines.recipe import Recipe

from .cut import Cut, Segment, cut_at_operators
from .engine_job import step_profiles
from .engine_process import EngineProcess
from .graph_record import with_graph
from .half import Arrays
from .kernel_compiler import Compile, compile_kernels
from .launch_plan import plan_launches
from .program_writer import ENGINES, GRAPHS, KERNELS, graph_file, write_program
from .rank_result import RankResult
from .segment_job import segment_job
from .segment_model import write_bare_graph, write_segment
from .segment_names import with_engine_names
from .shared_weights import write_shared

if TYPE_CHECKING:
    from .pipeline import Progress

TOOLCHAIN = ("tensorrt-rtx-cu13", "triton")
_WORK = "work"  # removed before the rank is done


def write_rank(
    recipe: Recipe,
    graph: ir.Model,
    parameters: Arrays,
    folder: Path,
    progress: Progress,
    max_build_memory: int | None = None,
    compile_all: Compile = compile_kernels,
) -> RankResult:
    """Write program.json, engines/, graphs/, kernels/ and, where weights are shared, weights.bin into `folder`.

    `graph`: in the recipe's precisions, sampling in its device form; its parameters are graph inputs, made by
    `parameters` in their stored types. `max_build_memory`: bytes of host memory that building engines may hold.
    `compile_all`: what makes cubins of kernels. Raises BuildError.
    """
    share_all = recipe.tensorrt.engine_weights == "stripped"
    cut = with_engine_names(cut_at_operators(graph, parameters.keys(), share_all=share_all))
    offsets, shared_bytes = write_shared(cut, parameters, folder)
    engines = _Engines(recipe, parameters, folder)
    _build_engines(cut, engines, folder, progress, max_build_memory)
    plan = plan_launches(cut.operators, recipe)
    kernels = compile_all(plan.kernels, recipe.compute_capabilities, folder / KERNELS, progress)
    program = write_program(cut, plan, kernels, offsets, recipe.limits.max_blocks_per_row, engines.files)
    (folder / FILE_NAME).write_text(program.to_json())
    return RankResult(
        weight_bytes=shared_bytes + engines.weight_bytes,
        notes=(),
        toolchain={name: version(name) for name in TOOLCHAIN},
        hardware={"compute_capabilities": ", ".join(recipe.compute_capabilities)},
        engines=tuple(engines.built),
    )


class _Engines:
    """Builds one engine after another; segments that are the same graph of no weights share one."""

    def __init__(self, recipe: Recipe, parameters: Arrays, folder: Path) -> None:
        self.weight_bytes = 0  # inside engines
        self.files: dict[str, str] = {}  # segment → engine
        self.built: list[EngineInfo] = []
        self._recipe, self._parameters, self._folder = recipe, parameters, folder
        self._by_graph: dict[bytes, str] = {}

    def build(self, segment: Segment, process: EngineProcess, progress: Progress) -> None:
        opset = segment.nodes[0].graph.opset_imports[""]
        model, weight_bytes = write_segment(segment, self._parameters, opset, self._folder / _WORK)
        graph = model.read_bytes()
        if not weight_bytes and graph in self._by_graph:
            self.files[segment.name] = self._by_graph[graph]
            return
        job = segment_job(segment, model, self._folder, self._recipe, step_profiles)
        info = process.build(job, weight_bytes, lambda phase, *_: progress.detail(f"{segment.name}: {phase}"))
        write_bare_graph(model, self._folder / graph_file(segment))
        self.built.append(with_graph(info, model))
        self.files[segment.name] = self._by_graph[graph] = info.file
        self.weight_bytes += weight_bytes


def _build_engines(cut: Cut, engines: _Engines, folder: Path, progress: Progress, max_build_memory: int | None) -> None:
    """Every segment's engine, in order."""
    for name in (_WORK, ENGINES, GRAPHS):
        (folder / name).mkdir()
    progress.stage("engines", len(cut.segments))
    with EngineProcess(max_build_memory) as process:
        for segment in cut.segments:
            engines.build(segment, process, progress)
            progress.advance(1)
    shutil.rmtree(folder / _WORK)

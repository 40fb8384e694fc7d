"""Every rank of a bundle that is compiled from a graph, from checkpoint to the files that its target runs (offline)."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from ostinato.engines.recipe import Recipe
from ostinato.engines.shards import WHOLE, Shard
from ostinato.engines.targets import GPU_TARGETS

from .checkpoint import Checkpoint, weight_sources
from .quantize import precision_notes, store_weights
from .rank_graph import StageGraphs, device_graph, portable_graph
from .rank_result import RankResult
from .shard import shard_sizes
from .weights import parameters_of, write_model

if TYPE_CHECKING:
    from .pipeline import Progress

WriteRank = Callable[[Recipe, Checkpoint, tuple[Shard, ir.Model], Path, "Progress"], RankResult]


def write_ranks(
    recipe: Recipe, checkpoint: Checkpoint, folder: Path, progress: Progress, max_build_memory: int | None
) -> tuple[RankResult, ...]:
    """Every rank's folder, in order; ranks are built one after another, so that memory holds one."""
    stages = StageGraphs(checkpoint.config, recipe)
    write = _write_cpu_rank if recipe.target not in GPU_TARGETS else _gpu_writer(max_build_memory)
    results = []
    for shard in recipe.shards.all():
        progress.stage(f"graph {shard.rank}" if recipe.shards.num_ranks > 1 else "graph")
        graph = stages.graph(shard)
        rank = folder / f"rank{shard.rank}"
        rank.mkdir()
        results.append(write(recipe, checkpoint, (shard, graph), rank, progress))
    return tuple(results)


def _write_cpu_rank(
    recipe: Recipe, checkpoint: Checkpoint, part: tuple[Shard, ir.Model], folder: Path, progress: Progress
) -> RankResult:
    """The portable graph and its weights: the CPU target compiles at load."""
    progress.stage("passes")
    model = portable_graph(part[1], checkpoint.config, recipe.limits.block_size, WHOLE)
    stored = store_weights(model, parameters_of(checkpoint, recipe.limits.max_context), recipe.weights)
    progress.stage("weights", sum(value.const_value.nbytes for value in stored.graph.initializers.values()))
    return RankResult(
        weight_bytes=write_model(stored, folder, progress.advance),
        notes=precision_notes(checkpoint, weight_sources(checkpoint.config), recipe.weights),
        toolchain={},
        hardware={"machine": platform.machine()},
    )


def _gpu_writer(max_build_memory: int | None) -> WriteRank:
    """Engines, kernels and program of one rank after another."""
    from .kernel_reuse import CompiledOnce  # TensorRT and Triton: only where the recipe asks for them

    compile_all = CompiledOnce()

    def write(
        recipe: Recipe, checkpoint: Checkpoint, part: tuple[Shard, ir.Model], folder: Path, progress: Progress
    ) -> RankResult:
        progress.stage("passes")
        shard, graph = part
        parameters = parameters_of(checkpoint, recipe.limits.max_context, shard)
        model, stored = device_graph(graph, checkpoint.config, recipe, shard, parameters)
        if recipe.target == "rtx":
            from .rtx import write_rank

            return write_rank(recipe, model, stored, folder, progress, max_build_memory, compile_all)
        from .trt import Tools
        from .trt import write_rank as write_trt_rank

        sizes = shard_sizes(checkpoint.config.sizes, shard)
        return write_trt_rank(recipe, model, stored, shard, sizes, folder, progress, Tools(compile_all))

    return write

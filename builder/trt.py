"""One rank for TensorRT: an engine with our operators inside, or engines with them between, and its program (offline).

    inside    inputs ─▶ feed kernel ─▶ decoder.engine (plugins launch our kernels) ─▶ tokens
    between   inputs ─▶ feed kernel ─▶ segment_00 ─▶ kernels ─▶ segment_01 ─▶ … ─▶ tokens      as on `rtx`

TensorRT times tactics, so this runs on a GPU such as the one that is to serve.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from ostinato.engines.engine_record import EngineInfo
from ostinato.engines.errors import BuildError
from ostinato.engines.program import FILE_NAME, EngineCall, Program
from ostinato.engines.recipe import Recipe
from ostinato.engines.shards import Shard
from ostinato.engines.sizes import ModelSizes
from ostinato.plugins.cubin import Cubins
from ostinato.plugins.paged_attention import PAGED_ATTENTION

from . import timing_cache
from .cut import Cut, cut_at_operators, is_operator
from .engine_job import EngineJob, step_profiles
from .graph_record import with_graph
from .half import Arrays
from .kernel_compiler import Compile, compile_kernels
from .launch_plan import LaunchPlan, plan_launches
from .program_writer import ENGINES, GRAPHS, KERNELS, graph_file, write_program
from .rank_result import RankResult
from .segment_job import segment_job
from .segment_model import write_bare_graph, write_segment
from .shared_weights import write_shared
from .trt_collective import Collective
from .trt_graph import ask_for_plugins, stand_in_collectives, whole_cut, write_whole
from .trt_presence import missing_tensorrt
from .trt_profiles import bucket_profiles

if TYPE_CHECKING:
    from .pipeline import Progress
    from .trt_builder import BuiltEngine, TensorRTBuilder

REFIT = "refit"  # graph and weights that a refittable engine takes its weights from
PACKAGE = "tensorrt-cu13"
_WORK = "work"  # removed before the rank is done


@dataclass(frozen=True)
class _Workbench:
    """What every engine of the rank is built with. `launcher`: None where no engine holds a plugin."""

    builder: TensorRTBuilder
    recipe: Recipe
    folder: Path
    launcher: Cubins | None
    collectives: Mapping[str, Collective]
    progress: Progress


@dataclass(frozen=True)
class Tools:
    """Who compiles kernels, and cuda-python's driver module, or None to import it when it is needed."""

    compile: Compile = compile_kernels
    driver: Any = None


def write_rank(
    recipe: Recipe,
    graph: ir.Model,
    parameters: Arrays,
    shard: Shard,
    sizes: ModelSizes,
    folder: Path,
    progress: Progress,
    tools: Tools = Tools(),
) -> RankResult:
    """Write program.json, engines/, graphs/, kernels/, timing.cache and, where needed, refit/ and weights.bin.

    `graph`: in the recipe's precisions, sampling in its device form; its parameters are graph inputs, made by
    `parameters` in their stored types. `sizes`: the rank's own.
    Raises BuildError or DeviceError; where TensorRT or the GPU is missing, before anything is written.
    """
    builder = _start()
    found = Cubins(folder / KERNELS, {}, tools.driver).compute_capability
    _check_gpu(recipe, found)
    cache = timing_cache.starting_cache(recipe.tensorrt, folder.parent / f"rank{shard.rank - 1}")
    is_inside = recipe.tensorrt.operators == "inside"
    plan = _launches(graph.graph, recipe, sizes)
    kernels = tools.compile(plan.kernels, recipe.compute_capabilities, folder / KERNELS, progress)
    launcher = Cubins(folder / KERNELS, kernels, tools.driver) if is_inside else None
    collectives = _to_plugins(graph.graph, recipe, plan) if is_inside else {}
    cut = whole_cut(graph.graph, parameters.keys()) if is_inside else cut_at_operators(graph, parameters.keys())
    bench = _Workbench(builder, recipe, folder, launcher, collectives, progress)
    offsets, shared_bytes = write_shared(cut, parameters, folder)
    inside_bytes, engines, notes = _build_engines(bench, cut, parameters, cache)
    program = write_program(cut, plan, kernels, offsets, recipe.limits.max_blocks_per_row)
    (folder / FILE_NAME).write_text((in_place(program) if is_inside else program).to_json())
    return RankResult(
        weight_bytes=shared_bytes + inside_bytes,
        notes=notes,
        toolchain={PACKAGE: builder.version, "triton": version("triton")},
        hardware={"machine": platform.machine(), "compute_capabilities": ", ".join(recipe.compute_capabilities)},
        engines=engines,
    )


def _launches(graph: ir.Graph, recipe: Recipe, sizes: ModelSizes) -> LaunchPlan:
    operators = tuple(node for node in graph if is_operator(node))
    layers = sum(node.op_type == PAGED_ATTENTION.name for node in operators)
    assert layers == sizes.num_layers, f"the graph has {layers} attentions, the rank {sizes.num_layers} layers"
    return plan_launches(operators, recipe)


def _to_plugins(graph: ir.Graph, recipe: Recipe, plan: LaunchPlan) -> dict[str, Collective]:
    """The passes for operators inside, in place; returns what stands for which collective."""
    collectives = stand_in_collectives(graph)
    ask_for_plugins(graph, recipe, plan.steps)
    return collectives


def in_place(program: Program) -> Program:
    """The program of one engine that changes inputs in place: what comes out of them lies in the same buffers.

    An engine does not say so of its plugins, so whoever binds it must. Its workspace stands for the kernels' scratch.
    """
    names = {buffer.name for buffer in program.buffers}
    same = {name: name.removesuffix(".out") for name in names if name.endswith(".out")}
    assert set(same.values()) <= names, "an output in place of an input that there is not"
    buffers = tuple(buffer for buffer in program.buffers if buffer.name not in same and buffer.kind != "scratch")
    calls = tuple(
        replace(call, outputs={tensor: same.get(buffer, buffer) for tensor, buffer in call.outputs.items()})
        if isinstance(call, EngineCall)
        else call
        for call in program.calls
    )
    engines = [call for call in calls if isinstance(call, EngineCall)]
    assert len(engines) == 1, "operators inside an engine leave one engine"
    return replace(program, buffers=buffers, calls=calls)


def _start() -> TensorRTBuilder:
    try:
        from .trt_builder import TensorRTBuilder
    except (ImportError, OSError) as error:  # the package, or the libraries that it loads
        raise BuildError(missing_tensorrt(str(error))) from None
    return TensorRTBuilder()


def _check_gpu(recipe: Recipe, found: str) -> None:
    """An engine is for the GPU that it was timed on, unless the recipe asks for one that runs elsewhere too."""
    wanted = recipe.compute_capabilities
    if found not in wanted:
        raise BuildError(
            f"this GPU has compute capability {found}, the recipe asks for {', '.join(wanted)}: build on such a GPU, "
            f"or --set 'compute_capabilities=[\"{found}\"]'"
        )
    if len(wanted) > 1 and recipe.tensorrt.hardware_compatibility != "ampere_plus":
        raise BuildError(
            f"one engine is to run on compute capabilities {', '.join(wanted)}, this one would run on {found} alone: "
            "set tensorrt.hardware_compatibility to ampere_plus, or build a bundle for each"
        )


def _build_engines(
    bench: _Workbench, cut: Cut, parameters: Arrays, cache: timing_cache.TimingCache
) -> tuple[int, tuple[EngineInfo, ...], tuple[str, ...]]:
    """Every engine in order, each from the tactics that those before it timed; weights inside, records, notes."""
    options = bench.recipe.tensorrt
    keeps = options.refit or options.engine_weights == "stripped"
    work = bench.folder / (REFIT if keeps else _WORK)
    work.mkdir()
    (bench.folder / ENGINES).mkdir()
    (bench.folder / GRAPHS).mkdir()
    total = 0
    engines: list[EngineInfo] = []
    notes: list[str] = []
    opset = cut.segments[0].nodes[0].graph.opset_imports[""]
    write, rule = (write_whole, bucket_profiles) if bench.launcher else (write_segment, step_profiles)
    bench.progress.stage("engines", len(cut.segments))
    for segment in cut.segments:
        model, weight_bytes = write(segment, parameters, opset, work)
        write_bare_graph(model, bench.folder / graph_file(segment))
        job = segment_job(segment, model, bench.folder, bench.recipe, rule)
        built = bench.builder.build(job, bench.collectives, bench.launcher, cache, bench.progress.detail)
        cache = cache.grown(built.timing_cache, bool(built.notes))
        engines.append(_record(job, built))
        notes += built.notes
        total += weight_bytes
        bench.progress.advance(1)
    if not keeps:
        shutil.rmtree(work)
    path = bench.folder / timing_cache.FILE_NAME
    path.write_bytes(cache.content)
    if not cache.is_pinned:
        notes.append(timing_cache.pinning_note(path, f"{bench.folder.name}/{path.name}"))
    return total, tuple(engines), tuple(dict.fromkeys(notes))


def _record(job: EngineJob, built: BuiltEngine) -> EngineInfo:
    """What the manifest keeps; the inspector's whole dump goes beside the engine."""
    memory = {profile.name: size for profile, size in zip(job.profiles, built.device_memory_bytes, strict=True)}
    dump = {"device_memory_bytes": memory, "inspector": json.loads(built.layers)}
    job.engine.with_suffix(".layers.json").write_text(json.dumps(dump, indent=1) + "\n")
    info = job.record(built.size_bytes, built.version)
    return with_graph(replace(info, device_memory_bytes=max(memory.values()), layers=built.layer_lines), job.model)

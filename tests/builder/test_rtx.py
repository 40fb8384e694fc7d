"""Real TensorRT-RTX engines of tiny models, built on any machine: files, records, weights, and the whole way."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from safetensors.numpy import load_file, save_file

from ostinato.builder.pipeline import build
from ostinato.builder.rank_result import RankResult
from ostinato.builder.rtx import write_rank
from ostinato.engines.bundle import open_bundle
from ostinato.engines.errors import BuildError
from ostinato.engines.program import EngineCall, KernelCall, KernelInfo, Program, program_from_json
from ostinato.engines.tensorrt_options import PLAIN, TensorRTOptions
from ostinato.plugins.kernel_launch import KernelSpec

from .conftest import LIMITS, Silent
from .gpu_graphs import GpuGraphs, RankGraph, gpu_recipe

pytestmark = pytest.mark.xdist_group("gpu graphs")  # one worker traces the models
STRIPPED = TensorRTOptions(engine_weights="stripped")
MIB = 1 << 20


class Watcher(Silent):
    """Keeps what the build says of TensorRT's phases."""

    def __init__(self) -> None:
        super().__init__()
        self.details: list[str] = []

    def detail(self, text: str) -> None:
        self.details.append(text)


def no_compiler(
    specs: Iterable[KernelSpec], capabilities: Sequence[str], folder: Path, progress: Any
) -> dict[str, dict[str, KernelInfo]]:
    """Empty cubins: engines are what is built here."""
    kernels: dict[str, dict[str, KernelInfo]] = {}
    for capability in capabilities:
        arch = f"sm_{capability.replace('.', '')}"
        (folder / arch).mkdir(parents=True)
        for spec in specs:
            (folder / arch / f"{spec.name}.cubin").write_bytes(b"cubin")
            kernels.setdefault(arch, {})[spec.name] = KernelInfo(spec.function, spec.num_warps, 0, 0, 32, 0)
    return kernels


@dataclass(frozen=True)
class Built:
    rank: RankGraph
    folder: Path
    result: RankResult
    watcher: Watcher

    @property
    def program(self) -> Program:
        path = self.folder / "program.json"
        return program_from_json(path.read_text(), path)


def built(graphs: GpuGraphs, name: str, folder: Path, options: TensorRTOptions = PLAIN) -> Built:
    rank = graphs.rank(name, "float16")
    recipe = replace(rank.recipe, tensorrt=options)
    watcher = Watcher()
    result = write_rank(recipe, rank.model, rank.parameters, folder, watcher, compile_all=no_compiler)
    return Built(rank, folder, result, watcher)


@pytest.fixture(scope="module")
def qwen3(graphs: GpuGraphs, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return built(graphs, "qwen3 wide heads", tmp_path_factory.mktemp("rtx"))


@pytest.fixture(scope="module")
def mistral(graphs: GpuGraphs, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return built(graphs, "mistral window 8", tmp_path_factory.mktemp("rtx"))


@pytest.fixture(scope="module")
def stripped(graphs: GpuGraphs, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return built(graphs, "llama tied", tmp_path_factory.mktemp("rtx"), STRIPPED)


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Built:
    found: Built = request.getfixturevalue(request.param)
    return found


every = pytest.mark.parametrize("made", ["qwen3", "mistral", "stripped"], indirect=True)


@every
def test_program_reads_back_and_every_file_is_there(made: Built) -> None:
    program = made.program
    engines = {call.engine for call in program.calls if isinstance(call, EngineCall)}
    kernels = {f"kernels/{arch}/{name}.cubin" for arch, by_name in program.kernels.items() for name in by_name}
    graphs = {f"graphs/{Path(engine).stem}.onnx" for engine in engines}
    wanted = engines | graphs | kernels | {"program.json"}
    weights = [buffer for buffer in program.buffers if buffer.kind == "weight"]
    wanted |= {"weights.bin"} if weights else set()
    files = {path.relative_to(made.folder).as_posix() for path in made.folder.rglob("*") if path.is_file()}
    assert files == wanted
    launched = {launch.kernel for steps in program.launches.values() for step in steps.values() for launch in step}
    assert all(launched == set(by_name) for by_name in program.kernels.values())
    assert set(program.kernels) == {"sm_86", "sm_120"}


@every
def test_a_step_begins_with_its_feed(made: Built) -> None:
    program = made.program
    assert program.calls[0] == KernelCall(
        "feed", "FeedTokens", {"input_ids": "input_ids", "feed_rows": "feed_rows", "last_tokens": "tokens"}
    )
    buffer = program.buffer("feed_rows")
    assert (buffer.dtype, buffer.shape, buffer.kind) == ("int32", ("T",), "input")
    for step in program.step_shapes:
        (launch,) = program.launches["FeedTokens"][step.key]
        assert (launch.grid, launch.arguments) == ((step.tokens, 1, 1), ("input_ids", "feed_rows", "last_tokens"))


@every
def test_records_say_what_the_engines_are(made: Built) -> None:
    program = made.program
    calls = {call.engine: call for call in program.calls if isinstance(call, EngineCall)}
    assert [info.file for info in made.result.engines] == list(calls)
    for info in made.result.engines:
        call = calls[info.file]
        assert (made.folder / info.file).stat().st_size == info.size_bytes
        assert {tensor.name for tensor in info.inputs} == set(call.inputs)
        assert {tensor.name for tensor in info.outputs} == set(call.outputs)
        for tensor in (*info.inputs, *info.outputs):  # an engine's tensors are those of its buffers
            buffer = program.buffer({**call.inputs, **call.outputs}[tensor.name])
            assert (tensor.dtype, tensor.shape) == (buffer.dtype, buffer.shape)
        assert [profile.name for profile in info.profiles] == ["decode", "prefill"]
        assert info.version.startswith("1.7")
        assert "header" in info.validity
        assert info.layers
        assert info.graph_digest
    assert made.result.toolchain["tensorrt-rtx-cu13"].startswith("1.7")
    assert made.result.hardware == {"compute_capabilities": "8.6, 12.0"}
    assert any(detail.startswith("segment_00: ") for detail in made.watcher.details)


@every
def test_every_weight_is_counted_once(made: Built) -> None:
    assert made.result.weight_bytes == sum(make().nbytes for make in made.rank.parameters.values())


@every
def test_graphs_beside_the_engines_run_elsewhere(made: Built) -> None:
    """Bare of weights: those of segments whose engines hold theirs are inputs too."""
    names: list[str] = []
    for info in made.result.engines:
        session = onnxruntime.InferenceSession(made.folder / "graphs" / f"{Path(info.file).stem}.onnx")
        inputs = {put.name for put in session.get_inputs()}
        assert inputs >= {tensor.name for tensor in info.inputs}
        assert {put.name for put in session.get_outputs()} == {tensor.name for tensor in info.outputs}
        names += inputs - {tensor.name for tensor in info.inputs}
    held = {buffer.name for buffer in made.program.buffers if buffer.kind == "weight"}
    assert bool(names) == (held != set(made.rank.parameters))


def test_profiles_hold_every_step_shape(qwen3: Built) -> None:
    last = qwen3.result.engines[-1]
    decode, prefill = last.profiles
    assert decode.shapes["logits_indices"] == ((1,), (2,), (4,))
    assert prefill.shapes["logits_indices"] == ((1,), (4,), (4,))
    assert decode.shapes["carried_0"] == ((1, 64), (2, 64), (4, 64))
    assert prefill.shapes["carried_0"] == ((16, 64), (64, 64), (64, 64))
    by_phase = {"decode": decode, "prefill": prefill}
    for step in qwen3.program.step_shapes:
        low, _, high = by_phase[step.phase].shapes["carried_0"]
        assert low[0] <= step.tokens <= high[0]


def test_every_step_shape_is_in_the_profile_of_its_phase_and_none_past_it(qwen3: Built) -> None:
    """Profiles overlap: 16 tokens may be decode rows or a prompt, so a phase names its profile, not a count."""
    top: dict[str, int] = {step.phase: step.tokens for step in qwen3.program.step_shapes}
    for info in qwen3.result.engines:
        for profile in info.profiles:
            counts = [
                shapes for name, shapes in profile.shapes.items() if name not in ("logits_indices", "head.weight")
            ]
            assert all(high[0] == top[profile.name] for _, _, high in counts), profile
    tables = qwen3.program.buffer("block_tables")
    assert tables.shape == ("B", LIMITS.max_blocks_per_row)


def test_stripped_engines_hold_no_weight_and_layers_share_one(stripped: Built) -> None:
    program = stripped.program
    calls = [call for call in program.calls if isinstance(call, EngineCall)]
    assert len(calls) == 5
    assert len(stripped.result.engines) == 3
    assert calls[1].engine == calls[2].engine == calls[3].engine
    content = (stripped.folder / "weights.bin").read_bytes()
    engines = b"".join((stripped.folder / info.file).read_bytes() for info in stripped.result.engines)
    bound = {buffer.name: buffer for buffer in program.buffers if buffer.kind == "weight"}
    assert set(bound) == set(stripped.rank.parameters)
    for name, make in stripped.rank.parameters.items():
        array = make()
        buffer = bound[name]
        assert (buffer.shape, buffer.offset % 256) == (array.shape, 0)
        assert content[buffer.offset : buffer.offset + array.nbytes] == array.tobytes()
        assert array.tobytes()[:256] not in engines, name
    assert calls[2].inputs["down.weight"] == "layers.1.down.weight"
    assert calls[3].inputs["down.weight"] == "layers.2.down.weight"


def test_a_table_inside_an_engine_is_there_once(qwen3: Built) -> None:
    engines = [(qwen3.folder / info.file).read_bytes() for info in qwen3.result.engines]
    for name in ("rope_cos", "embedding.weight", "head.weight"):
        piece = qwen3.rank.parameters[name]().tobytes()[-512:]
        assert sum(engine.count(piece) for engine in engines) == 1, name


# --- the whole way -------------------------------------------------------------------------------------------------


def test_a_recipe_becomes_a_bundle_that_opens(graphs: GpuGraphs, tmp_path: Path) -> None:
    """With our kernels' own cubins, for one GPU."""
    recipe = replace(
        gpu_recipe(graphs.checkpoint("mistral window 8"), "float16", "int8"), compute_capabilities=("8.6",)
    )
    out = tmp_path / "bundle"
    progress = Silent()
    bundle = build(recipe, out, progress).bundle
    assert progress.stages == ["checkpoint", "graph", "passes", "engines", "kernels", "tokenizer", "publish"]
    opened = open_bundle(out)
    assert opened.manifest == bundle.manifest
    (engines,) = opened.manifest.engines
    assert [info.file for info in engines] == [f"engines/segment_{index:02}.engine" for index in range(3)]
    program = opened.program()
    assert {buffer.dtype for buffer in program.buffers if buffer.kind == "cache"} == {"uint8"}
    for name, info in program.kernels["sm_86"].items():
        assert (opened.rank_dir() / "kernels" / "sm_86" / f"{name}.cubin").read_bytes().startswith(b"\x7fELF")
        assert info.spill_bytes == 0
    assert build(recipe, out, Silent()).is_reused


def test_a_weight_that_float16_lacks_ends_the_build_and_leaves_nothing(graphs: GpuGraphs, tmp_path: Path) -> None:
    shutil.copytree(graphs.checkpoint("mistral window 8"), tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 7e4
    save_file(tensors, file, {"format": "np"})
    with pytest.raises(
        BuildError, match=r"layers\.1\.down\.weight holds 70000, .*set weights and kv_cache to bfloat16"
    ):
        build(gpu_recipe(tmp_path / "checkpoint", "float16"), tmp_path / "bundle", Silent())
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", ".bundle.lock"}


def test_a_build_without_the_memory_leaves_nothing(graphs: GpuGraphs, tmp_path: Path) -> None:
    recipe = gpu_recipe(graphs.checkpoint("mistral window 8"), "float16")
    with pytest.raises(BuildError, match="--max-build-memory allows 100"):
        build(recipe, tmp_path / "bundle", Silent(), max_build_memory=100 * MIB)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]

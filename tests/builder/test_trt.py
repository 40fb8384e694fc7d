"""The whole path of target `trt` without a GPU: what TensorRT is told to build, and the program that is written."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from ostinato.builder.checkpoint import Checkpoint
from ostinato.builder.engine_job import prefill_buckets
from ostinato.builder.weights import parameters_of
from ostinato.engines.errors import BuildError, DeviceError
from ostinato.engines.program import EngineCall, KernelCall
from ostinato.engines.shards import Shards
from ostinato.engines.sizes import MAX_LOGPROBS
from ostinato.plugins.launch_table import launch_table_from_json

from ..cuda_driver import FakeDriver
from ..tensorrt_fakes import TIMED, Builder, Network
from ..tiny import VOCAB_SIZE
from .conftest import LIMITS
from .trt_ranks import FEED, FLAG, config, network, program_at, recipe_of, trt, written

pytestmark = pytest.mark.xdist_group("trt")  # one worker traces, not two

# -- operators inside


def test_one_strongly_typed_engine_with_our_operators_as_plugins(checkpoint: Checkpoint, tmp_path: Path) -> None:
    result, folder = written(recipe_of(), checkpoint, tmp_path)
    assert network().flags == 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    plugins = [layer for layer in network().layers if layer.plugin is not None]
    assert [layer.kind for layer in plugins] == ["PagedAttention"] * 2 + ["StatefulSampling"]
    assert config().preview == {trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03: True}
    assert config().profiling_verbosity == trt.ProfilingVerbosity.DETAILED
    assert config().flags == {FLAG.EDITABLE_TIMING_CACHE}, "TF32 is off, and nothing is on that the recipe leaves out"
    assert [engine.file for engine in result.engines] == ["engines/decoder.engine"]
    assert sorted(path.relative_to(folder).parts[0] for path in folder.iterdir()) == [
        "engines", "graphs", "kernels", "program.json", "timing.cache",
    ]  # fmt: skip
    assert result.toolchain["tensorrt-cu13"] == trt.__version__
    assert result.hardware["compute_capabilities"] == "9.0"


def test_a_profile_for_every_decode_bucket_and_one_for_prefill(checkpoint: Checkpoint, tmp_path: Path) -> None:
    result, _ = written(recipe_of(), checkpoint, tmp_path)
    profiles = [profile.shapes for profile in config().profiles]
    assert [profile.name for profile in result.engines[0].profiles] == ["decode 1", "decode 2", "decode 4", "prefill"]
    assert len(profiles) == 4
    for rows, shapes in zip((1, 2, 4), profiles, strict=False):
        assert shapes["input_ids"] == ((rows,),) * 3
        assert shapes["query_starts"] == ((rows + 1,),) * 3
        assert shapes["temperature"] == ((rows,),) * 3
    prefill, tokens = profiles[-1], prefill_buckets(LIMITS)
    assert prefill["input_ids"] == ((tokens[0],), (64,), (64,))
    assert prefill["context_lens"] == prefill["uniforms"] == ((4,),) * 3
    for shapes in profiles:
        assert shapes["key_cache.1"] == ((LIMITS.num_blocks, 2, 8, 16),) * 3
        assert shapes["block_tables"][0] == (shapes["context_lens"][0][0], LIMITS.max_blocks_per_row)
        assert shapes["counts"] == ((LIMITS.max_rows + 2, VOCAB_SIZE),) * 3
        assert shapes["logprob_slots"] == ((MAX_LOGPROBS,),) * 3
        assert set(shapes) == {tensor.name for tensor in network().inputs}


def test_the_program_feeds_one_engine_whose_caches_and_counts_stay_in_place(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    _, folder = written(recipe_of(), checkpoint, tmp_path)
    program = program_at(folder)
    feed, call = program.calls
    assert feed == FEED
    assert isinstance(call, EngineCall)
    assert call.engine == "engines/decoder.engine"
    assert set(call.inputs) == {tensor.name for tensor in network().inputs}
    assert call.outputs["key_cache.0.out"] == call.inputs["key_cache.0"]
    assert call.outputs["counts.out"] == call.inputs["counts"]
    buffers = {buffer.name: buffer for buffer in program.buffers}
    assert set(call.inputs.values()) | set(call.outputs.values()) | {"feed_rows"} == set(buffers)
    assert "feed_rows" not in call.inputs
    for step in program.step_shapes:
        (launch,) = program.launches["FeedTokens"][step.key]
        assert launch.grid == (step.tokens, 1, 1)
        assert (folder / "kernels" / "sm_90" / f"{launch.kernel}.cubin").is_file()
    assert buffers["counts"].kind == "state"
    assert buffers["value_cache.1"].kind == "cache"
    assert buffers["tokens"].kind == "output"
    assert {step.key for step in program.step_shapes} == set(program.launches["PagedAttention"])
    assert set(program.kernels) == {"sm_90"}


def test_plugins_carry_the_launches_of_every_step(checkpoint: Checkpoint, tmp_path: Path) -> None:
    _, folder = written(recipe_of(), checkpoint, tmp_path)
    plan = json.loads((folder / "engines" / "decoder.engine").read_text())
    program = program_at(folder)
    for kept, operator in zip(plan["plugins"], ("PagedAttention",) * 2 + ("StatefulSampling",), strict=True):
        table = launch_table_from_json(bytes.fromhex(kept["launches"]).decode())
        for step in program.step_shapes:
            sizes = (step.tokens, step.rows) if operator == "PagedAttention" else (step.rows,)
            assert table.at(sizes).launches == program.launches[operator][step.key]
        assert set(table.kernels) <= set(program.kernels["sm_90"])


@pytest.mark.parametrize("kv_cache", ["int8", "float8_e4m3"])
def test_quantized_caches_are_int8_to_tensorrt(checkpoint: Checkpoint, tmp_path: Path, kv_cache: str) -> None:
    result, folder = written(recipe_of(kv_cache=kv_cache, refit=True), checkpoint, tmp_path)
    model = onnx.load(folder / "refit" / "decoder.onnx", load_external_data=False)
    caches = [value for value in (*model.graph.input, *model.graph.output) if "_cache." in value.name]
    assert len(caches) == 8
    assert {value.type.tensor_type.elem_type for value in caches} == {onnx.TensorProto.INT8}
    shapes = {tensor.name: tensor.shape for tensor in result.engines[0].inputs}
    assert shapes["key_cache.0"] == ("N", 2, 8 * (16 + 4))


def test_the_weights_are_those_of_the_checkpoint_each_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    result, folder = written(recipe_of(engine_weights="stripped"), checkpoint, tmp_path)
    model = onnx.load(folder / "refit" / "decoder.onnx")
    assert not model.functions, "the parser would inline a body and ask for no plugin"
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    table = checkpoint.read("model.embed_tokens.weight")
    np.testing.assert_array_equal(held["embedding.weight"], table.astype(np.float16))
    large = [array for array in held.values() if array.size >= table.size]
    assert len(large) == 1, "a tied table stands in the engine once"
    assert result.weight_bytes == sum(
        array.nbytes for name, array in held.items() if name in parameters_of(checkpoint, LIMITS.max_context)
    )


# -- shards


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_become_native_layers(checkpoint: Checkpoint, tmp_path: Path, rank: int) -> None:
    result, folder = written(recipe_of(Shards(tensor_parallel=2)), checkpoint, tmp_path, rank)
    native = [layer for layer in network().layers if layer.kind == "DIST_COLLECTIVE"]
    every_rank: list[int] = []
    reduce = (trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM, -1, every_rank)
    gather = (trt.CollectiveOperation.ALL_GATHER, trt.ReduceOperation.NONE, -1, every_rank)
    # the embedding's shares, two sums a layer, and the logits' parts
    assert [layer.arguments for layer in native] == [reduce] * 5 + [gather]
    assert {layer.num_ranks for layer in native} == {2}
    placeholders = [layer for layer in network().layers if layer.name.startswith(("all_reduce_", "all_gather_"))]
    for layer, placeholder in zip(native, [p for p in placeholders if p.kind == "Identity"], strict=True):
        assert placeholder.get_input(0) is layer.get_output(0)
        assert layer.get_input(0) is not layer.get_output(0)
    assert [type(call) for call in program_at(folder).calls] == [KernelCall, EngineCall]
    assert {tensor.name: tensor.shape for tensor in result.engines[0].inputs}["key_cache.0"] == ("N", 1, 8, 16)


def test_a_collective_that_tensorrt_refuses_is_a_refusal(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Network, "refuses_collectives", True)
    with pytest.raises(BuildError, match="refuses AllReduce for all_reduce_0"):
        written(recipe_of(Shards(tensor_parallel=2)), checkpoint, tmp_path)


def test_stages_hand_on_the_hidden_state_and_what_was_timed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    recipe = recipe_of(Shards(pipeline_parallel=2))
    _, first = written(recipe, checkpoint, tmp_path, 0)
    (call,) = program_at(first).calls  # a stage does not feed itself
    assert isinstance(call, EngineCall)
    assert "hidden_out" in call.outputs
    assert [layer.kind for layer in network().layers if layer.plugin] == ["PagedAttention"]
    _, second = written(recipe, checkpoint, tmp_path, 1)
    assert [layer.kind for layer in network().layers if layer.plugin] == ["PagedAttention", "StatefulSampling"]
    assert config().profiles[-1].shapes["hidden_in"] == ((16, 64), (64, 64), (64, 64))
    assert (second / "timing.cache").read_bytes() == (first / "timing.cache").read_bytes() + TIMED


# -- operators between


def test_between_builds_the_segments_of_rtx_with_tensorrt(checkpoint: Checkpoint, tmp_path: Path) -> None:
    result, folder = written(recipe_of(operators="between"), checkpoint, tmp_path)
    program = program_at(folder)
    kinds = [type(call) for call in program.calls]
    assert kinds == [KernelCall, *[EngineCall, KernelCall] * 3]
    assert program.calls[0] == FEED
    assert [engine.file for engine in result.engines] == [f"engines/segment_0{index}.engine" for index in range(3)]
    assert all(not layer.plugin for layer in network().layers)
    assert config().preview == {}
    assert [profile.name for profile in result.engines[1].profiles] == ["decode", "prefill"]
    assert (folder / "weights.bin").is_file(), "the tied table is bound to the first and to the last segment"
    assert (folder / "timing.cache").read_bytes() == TIMED * 3, "each engine starts from what those before it timed"


# -- refusals


def test_without_tensorrt_the_command_says_so_in_one_line(checkpoint: Checkpoint, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny-trt.toml"
    recipe.write_text(
        f'checkpoint = "{checkpoint.path}"\ntarget = "trt"\nweights = "float16"\nkv_cache = "float16"\n'
        'compute_capabilities = ["9.0"]\n[limits]\nblock_size = 8\nmax_context = 96\nkv_tokens = 256\n'
    )
    code = (
        "import sys; sys.modules['tensorrt'] = None\n"
        "from ostinato.engines.command import main\n"
        f"sys.exit(main(['build', {str(recipe)!r}, '--out', {str(tmp_path / 'out')!r}]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 2
    (line,) = ran.stderr.strip().splitlines()
    assert line.startswith("ostinato build: target trt needs TensorRT 11")
    assert "choose target rtx" in line
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_the_refusal_gives_tensorrts_reason(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Builder, "fault", "no GPU")
    with pytest.raises(DeviceError, match=r"CUDA initialization failure with error: 35.*choose target rtx"):
        written(recipe_of(), checkpoint, tmp_path)
    assert not list((tmp_path / "rank0").iterdir())


def test_a_gpu_that_the_recipe_does_not_name_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"capability 8\.9, the recipe asks for 9\.0"):
        written(recipe_of(), checkpoint, tmp_path, driver=FakeDriver((8, 9)))
    (tmp_path / "rank0").rmdir()
    two = replace(recipe_of(), compute_capabilities=("8.9", "9.0"))
    with pytest.raises(BuildError, match="ampere_plus, or build a bundle for each"):
        written(two, checkpoint, tmp_path)


def test_a_failed_build_ends_with_tensorrts_last_words(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Builder, "fault", "out of memory")
    with pytest.raises(BuildError, match=r"decoder: TensorRT .* \(out of memory\): see that GPU memory is free"):
        written(recipe_of(), checkpoint, tmp_path)

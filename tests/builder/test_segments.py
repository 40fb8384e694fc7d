"""A graph cut at our operators, run as its program says, computes what the uncut graph computes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.builder.cut import cut_at_operators
from ostinato.builder.half import Arrays
from ostinato.builder.pipeline import read_checkpoint
from ostinato.builder.quantize import store_weights
from ostinato.builder.rank_graph import portable_graph
from ostinato.builder.segment_model import segment_proto
from ostinato.builder.weights import MODEL_FILE, parameters_of, write_model
from ostinato.engines.program import Buffer, EngineCall, KernelCall
from ostinato.engines.shards import WHOLE, Shards
from ostinato.engines.sizes import MAX_LOGIT_BIAS

from ..tiny import VOCAB_SIZE
from .conftest import BLOCK_SIZE, LIMITS
from .gpu_graphs import MODELS, GpuGraphs, RankGraph
from .paged_runner import PagedRequests, PagedRunner
from .program_runner import (
    OPSET,
    empty_state,
    neutral_device_sampling,
    runner_of,
    step_together,
)

pytestmark = pytest.mark.xdist_group("gpu graphs")  # one worker traces the models
NUM_BLOCKS = 48
# Tokens that each of three requests brings: chunks cross blocks, rows join late, decode shares with prefill.
STEPS = [(13, 0, 0), (1, 17, 0), (14, 1, 8), (1, 3, 1), (9, 1, 0), (1, 1, 1)]


def steps() -> list[list[tuple[int, list[int]]]]:
    rng = np.random.default_rng(3)
    return [
        [(row, rng.integers(0, VOCAB_SIZE, size=count).tolist()) for row, count in enumerate(counts) if count]
        for counts in STEPS
    ]


def uncut_logits(graphs: GpuGraphs, name: str, folder: Path) -> list[Any]:
    """Of the portable float32 graph, in one session."""
    checkpoint = read_checkpoint(graphs.checkpoint(name))
    model = portable_graph(graphs.traced(name), checkpoint.config, BLOCK_SIZE, WHOLE)
    parameters = parameters_of(checkpoint, LIMITS.max_context)
    path = write_portable(model, parameters, folder)
    runner = PagedRunner(path, checkpoint.config.sizes, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    return [runner.step(rows)["logits"] for rows in steps()]


def write_portable(model: Any, parameters: Arrays, folder: Path) -> Path:
    write_model(store_weights(model, parameters, "float32"), folder, lambda size: None)
    return folder / MODEL_FILE


def sampling_call(rank: RankGraph) -> KernelCall:
    call = rank.program.calls[-1]
    assert isinstance(call, KernelCall)
    assert call.operator == "StatefulSampling"
    return call


def logits_of(call: KernelCall) -> str:
    return call.arguments["logits"]


def run(ranks: list[RankGraph]) -> list[tuple[Any, Any]]:
    """Logits and greedy tokens of every step, all slices in lockstep."""
    runners = [runner_of(rank.cut, rank.program, rank.parameters, rank.attributes, NUM_BLOCKS) for rank in ranks]
    requests = PagedRequests(BLOCK_SIZE, NUM_BLOCKS)
    found = []
    for rows in steps():
        feeds = requests.feeds(rows)
        count = len(feeds["input_ids"])
        for runner in runners:
            runner.buffers |= empty_state(count + 1, VOCAB_SIZE, MAX_LOGIT_BIAS)
        buffers = step_together(runners, feeds | neutral_device_sampling(count, VOCAB_SIZE))
        feed, *_, sampling = ranks[0].program.calls
        assert isinstance(feed, KernelCall)
        assert feed.operator == "FeedTokens"
        assert isinstance(sampling, KernelCall)
        assert sampling.operator == "StatefulSampling"
        assert buffers["counts"].sum() == count  # the state was changed in place
        found.append((buffers[logits_of(sampling)], buffers["tokens"]))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_float32_segments_equal_the_uncut_graph(graphs: GpuGraphs, name: str, tmp_path: Path) -> None:
    wanted = uncut_logits(graphs, name, tmp_path)
    for (logits, tokens), reference in zip(run([graphs.rank(name, "float32")]), wanted, strict=True):
        np.testing.assert_allclose(logits, reference, atol=1e-5, rtol=1e-5)
        np.testing.assert_array_equal(tokens, reference.argmax(-1))


@pytest.mark.parametrize(("weights", "share"), [("float16", 0.01), ("bfloat16", 0.12)])
@pytest.mark.parametrize("name", MODELS)
def test_half_segments_stay_close_to_float32(
    graphs: GpuGraphs, name: str, weights: str, share: float, tmp_path: Path
) -> None:
    rank = graphs.rank(name, weights)
    assert {b.dtype for b in rank.program.buffers if b.kind == "cache"} == {weights}
    for (logits, _), reference in zip(run([rank]), uncut_logits(graphs, name, tmp_path), strict=True):
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, reference, atol=share * np.abs(reference).max())


def test_weights_bound_from_outside_give_the_same(graphs: GpuGraphs) -> None:
    inside, outside = (graphs.rank("llama tied", "float32", share_all=share) for share in (False, True))
    assert all(not segment.parameters for segment in outside.cut.segments)
    for (logits, _), (wanted, _) in zip(run([outside]), run([inside]), strict=True):
        np.testing.assert_array_equal(logits, wanted)


def test_layers_of_unbound_weights_are_one_graph(graphs: GpuGraphs) -> None:
    segments = graphs.rank("llama tied", "float16", share_all=True).cut.segments
    protos = [segment_proto(segment, [], OPSET).SerializeToString(deterministic=True) for segment in segments]
    assert len(protos) == 5
    assert protos[1] == protos[2] == protos[3]
    assert len(set(protos)) == 3


def test_slices_in_lockstep_equal_the_uncut_graph(graphs: GpuGraphs, tmp_path: Path) -> None:
    name = "llama untied, biases"
    shards = Shards(tensor_parallel=2)
    ranks = [graphs.rank(name, "float32", shard=shard) for shard in shards.all()]
    kinds = Counter(getattr(call, "operator", "engine") for call in ranks[0].program.calls)
    assert kinds == {
        "engine": 9,
        "AllReduce": 5,
        "AllGather": 1,
        "PagedAttention": 2,
        "StatefulSampling": 1,
        "FeedTokens": 1,
    }
    for (logits, _), reference in zip(run(ranks), uncut_logits(graphs, name, tmp_path), strict=True):
        np.testing.assert_allclose(logits, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_no_weight_or_table_crosses_a_cut(graphs: GpuGraphs, name: str, weights: str) -> None:
    rank = graphs.rank(name, weights)
    segments = rank.cut.segments
    layers = rank.checkpoint.config.sizes.num_layers
    assert len(segments) == layers + 1
    homes = Counter(value.name for segment in segments for value in segment.parameters)
    shared = {value.name for value in rank.cut.shared}
    assert set(homes.values()) == {1}
    assert not shared & set(homes)
    assert shared | set(homes) == set(rank.parameters)
    assert shared == ({"embedding.weight"} if rank.checkpoint.config.tied else set())
    for segment in segments[1:]:
        crossing = [v for v in segment.inputs if v.name not in shared | {"logits_indices"}]
        assert all(value.shape[0].value == "T" for value in crossing), crossing
        # the residual and an attention's output, and the angles of each token where another attention follows
        assert len(crossing) == (2 if segment is segments[-1] else 4)


def test_a_cut_tensors_buffer_is_used_again_once_it_is_free(graphs: GpuGraphs) -> None:
    program = graphs.rank("llama tied", "float16").program
    cuts = [buffer for buffer in program.buffers if buffer.kind == "cut"]
    # cos, sin, two residuals that take turns; q, k, v and an attention's output; logits
    assert len(cuts) == 9
    assert {b.name for b in program.buffers if b.kind == "weight"} == {"embedding.weight"}
    by_name = {buffer.name: buffer for buffer in program.buffers}
    assert len(by_name) == len(program.buffers)
    for call in program.calls:
        assert isinstance(call, EngineCall | KernelCall)
        if isinstance(call, EngineCall):  # no engine writes what it reads
            assert not set(call.inputs.values()) & set(call.outputs.values())
        named = call.arguments if isinstance(call, KernelCall) else {**call.inputs, **call.outputs}
        assert all(isinstance(by_name[buffer], Buffer) for buffer in named.values())


def test_program_names_every_launch_of_every_step_shape(graphs: GpuGraphs) -> None:
    program = graphs.rank("qwen3 wide heads", "float16", "int8").program
    keys = [step.key for step in program.step_shapes]
    assert keys == ["decode 1", "decode 2", "decode 4", "prefill 16", "prefill 64"]
    assert {step.rows for step in program.step_shapes if step.phase == "prefill"} == {LIMITS.max_rows}
    calls = {call.operator: call for call in program.calls if isinstance(call, KernelCall)}
    for operator, by_step in program.launches.items():
        assert list(by_step) == keys
        for launch in (launch for launches in by_step.values() for launch in launches):
            assert set(launch.arguments) <= set(calls[operator].arguments)
    assert {(b.dtype, len(b.shape)) for b in program.buffers if b.kind == "cache"} == {("uint8", 3)}


def test_a_step_fed_from_the_one_before_is_the_step_whose_ids_the_host_knew(graphs: GpuGraphs) -> None:
    """Rows trade places between the steps; one is not fed."""
    rank = graphs.rank("llama tied", "float32")
    found = []
    for is_fed in (False, True):
        runner = runner_of(rank.cut, rank.program, rank.parameters, rank.attributes, NUM_BLOCKS)
        requests = PagedRequests(BLOCK_SIZE, NUM_BLOCKS)
        runner.buffers |= empty_state(5, VOCAB_SIZE, MAX_LOGIT_BIAS)
        before = runner.step(
            requests.feeds([(0, [5, 6, 7]), (1, [8]), (2, [9, 4])]) | neutral_device_sampling(3, VOCAB_SIZE)
        )
        tokens = before["tokens"].tolist()
        feeds = requests.feeds([(2, [tokens[2]]), (0, [tokens[0]]), (1, [11])])
        if is_fed:
            assert feeds["input_ids"].tolist() == [tokens[2], tokens[0], 11]
            feeds |= {
                "input_ids": np.array([0, 0, 11], np.int32), "feed_rows": np.array([2, 0, -1], np.int32),
            }  # fmt: skip
        found.append(runner.step(feeds | neutral_device_sampling(3, VOCAB_SIZE)))
    for name in ("tokens", "input_ids", "key_cache.0", logits_of(sampling_call(rank))):
        np.testing.assert_array_equal(found[0][name], found[1][name])


def test_a_stage_of_a_pipeline_does_not_feed_itself(graphs: GpuGraphs) -> None:
    for shard in Shards(pipeline_parallel=2).all():
        program = graphs.rank("llama untied, biases", "float32", shard=shard).program
        assert "FeedTokens" not in program.launches
        assert "feed_rows" not in {buffer.name for buffer in program.buffers}
        assert "FeedTokens" not in {getattr(call, "operator", "engine") for call in program.calls}


def test_a_weight_that_two_segments_read_is_shared(graphs: GpuGraphs) -> None:
    rank = graphs.rank("llama tied", "float32")
    held = {value.name: value for value in rank.model.graph.inputs}
    rank.cut.segments[-1].nodes[-1].replace_input_with(1, held["layers.0.qkv.weight"])
    cut = cut_at_operators(rank.model, rank.parameters.keys())
    assert {value.name for value in cut.shared} == {"layers.0.qkv.weight"}

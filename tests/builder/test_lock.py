"""A lock refuses every build that is not the locked one, and lists what is not as locked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ostinato.builder.identity import Ingredients, ingredients_of
from ostinato.builder.lock import Pins, lock_of, lock_path, read_pins, write_lock
from ostinato.engines.errors import BuildError
from ostinato.engines.recipe import Recipe
from ostinato.engines.shards import Shards
from ostinato.engines.tensorrt_options import TensorRTOptions

from ..engines.made import engines_of, fill_gpu, gpu_manifest_of
from .conftest import LIMITS

INGREDIENTS = Ingredients(
    checkpoint="c" * 64,
    recipe={"target": "rtx"},
    timing_cache="",
    sources="s" * 64,
    toolchain={"onnx": "1.0", "triton": "3.9.0"},
    machine="x86_64",
)


@pytest.fixture
def pins(tmp_path: Path) -> Pins:
    (tmp_path / "bundle").mkdir()
    fill_gpu(tmp_path / "bundle")
    path = lock_path(tmp_path / "recipe.toml")
    write_lock(path, lock_of(INGREDIENTS, gpu_manifest_of(tmp_path / "bundle")))
    return read_pins(path)


def test_the_same_build_passes(tmp_path: Path, pins: Pins) -> None:
    assert pins.path.name == "recipe.lock.json"
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "recipe.lock.json"}
    pins.check_ingredients(INGREDIENTS)
    manifest = gpu_manifest_of(tmp_path / "bundle")
    pins.check_graphs(dataclasses.replace(manifest, latency={}, weight_bytes=1))  # nothing of the graph


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"checkpoint": "d" * 64}, f"checkpoint is {'d' * 16}, locked is {'c' * 16}"),
        ({"sources": "t" * 64}, f"sources is {'t' * 16}, locked is {'s' * 16}"),
        ({"timing_cache": "e" * 64}, f"timing_cache is {'e' * 16}, locked is ;"),
        ({"machine": "aarch64"}, "machine is aarch64, locked is x86_64"),
        ({"recipe": {"target": "trt"}}, r"recipe is \w{16}, locked is \w{16}"),
        ({"toolchain": {"onnx": "1.0", "triton": "3.8.0"}}, r"triton is 3\.8\.0, locked is 3\.9\.0"),
        ({"toolchain": {"onnx": "1.0"}}, r"triton is not used, locked is 3\.9\.0"),
        ({"toolchain": {**INGREDIENTS.toolchain, "torch": "2"}}, "torch is 2, locked is not used"),
    ],
)
def test_another_ingredient_is_refused(pins: Pins, changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(BuildError, match=wanted) as caught:
        pins.check_ingredients(dataclasses.replace(INGREDIENTS, **changes))
    assert "locks another build" in str(caught.value)
    assert "identity is" in str(caught.value)


def test_another_graph_of_the_same_sources_is_refused(tmp_path: Path, pins: Pins) -> None:
    manifest = gpu_manifest_of(tmp_path / "bundle")
    first, second = engines_of(0)
    other = (first, dataclasses.replace(second, graph_digest="x")), engines_of(1)
    with pytest.raises(BuildError, match=r"locks graphs with digest \w{16}, this build of the same sources made"):
        pins.check_graphs(dataclasses.replace(manifest, engines=other))


def test_a_missing_or_broken_lock_is_refused(tmp_path: Path, pins: Pins) -> None:
    with pytest.raises(
        BuildError, match=r"no lock at .*none\.lock\.json: write one with `ostinato build RECIPE --lock`"
    ):
        read_pins(tmp_path / "none.lock.json")
    for content in ("", "[]", "{}", '{"identity": 3}', pins.path.read_text().replace('"3.9.0"', "3.9")):
        pins.path.write_text(content)
        with pytest.raises(BuildError, match="again with --lock"):
            read_pins(pins.path)


def test_a_lock_that_can_not_be_written_is_said(tmp_path: Path, pins: Pins) -> None:
    path = tmp_path / "taken.lock.json"
    path.mkdir()
    with pytest.raises(BuildError, match=r"is built, but its lock .*taken\.lock\.json can't be written \(Is a dir"):
        write_lock(path, pins.lock)
    assert not list(tmp_path.glob(".taken*"))


def test_the_identity_follows_all_that_a_gpu_build_is_made_of(tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    recipe = Recipe("tiny", "model.gguf", "trt", "float16", "float16", LIMITS, compute_capabilities=("8.9",))
    pinned = TensorRTOptions(timing_cache="here", timing_cache_sha256="1" * 64)
    variants = [
        recipe,
        dataclasses.replace(recipe, compute_capabilities=("8.9", "9.0")),
        dataclasses.replace(recipe, shards=Shards(tensor_parallel=2)),
        dataclasses.replace(recipe, shards=Shards(pipeline_parallel=2)),
        dataclasses.replace(recipe, tensorrt=TensorRTOptions(optimization_level=2)),
        dataclasses.replace(recipe, tensorrt=pinned),
        dataclasses.replace(recipe, tensorrt=dataclasses.replace(pinned, timing_cache_sha256="2" * 64)),
        dataclasses.replace(recipe, target="rtx", compute_capabilities=("8.9",)),
    ]
    identities = [ingredients_of(variant, source).identity for variant in variants]
    assert len(set(identities)) == len(variants)
    moved = dataclasses.replace(recipe, tensorrt=dataclasses.replace(pinned, timing_cache="there"))
    assert ingredients_of(moved, source).identity == identities[5]  # its content counts, not its place
    assert {"triton", "tensorrt-rtx-cu13"} <= set(ingredients_of(variants[-1], source).toolchain)
    cpu = Recipe("tiny", "model.gguf", "cpu", "float32", "float32", LIMITS)
    assert "triton" not in ingredients_of(cpu, source).toolchain

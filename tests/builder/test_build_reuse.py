"""A build that was made before is taken from where it lies; a locked one is that build or none."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from ostinato.builder.build_cache import BuildCache
from ostinato.builder.command import build as build_command
from ostinato.builder.identity import ingredients_of
from ostinato.builder.lock import Pins, lock_of, lock_path, read_pins
from ostinato.builder.pipeline import build
from ostinato.engines.bundle import open_bundle
from ostinato.engines.errors import BuildError

from .conftest import Pair, Silent, tiny_recipe


@pytest.fixture
def checkpoint(llama: Pair) -> Path:
    return llama[1].path.parent / "checkpoint"


def test_switching_a_recipe_back_builds_nothing(llama: Pair, checkpoint: Path, tmp_path: Path) -> None:
    cache, out, recipe = BuildCache(tmp_path / "cache"), tmp_path / "b", tiny_recipe(checkpoint)
    first = build(recipe, out, Silent(), bundles=cache)
    other = dataclasses.replace(recipe, kv_cache="int8")
    assert not build(other, out, Silent(), bundles=cache).is_cached
    assert open_bundle(out).manifest.kv_cache == "int8"
    for switched in (recipe, other, recipe):
        progress = Silent()
        built = build(switched, out, progress, bundles=cache)
        assert built.is_cached
        assert not built.is_reused
        assert progress.stages == ["checkpoint"]
        assert open_bundle(out).manifest.kv_cache == switched.kv_cache
    assert open_bundle(out).manifest == first.bundle.manifest
    assert not build(recipe, out, Silent(), bundles=cache).is_cached  # it is there already
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "b", ".b.lock"}


def test_a_locked_build_is_that_build_or_none(llama: Pair, checkpoint: Path, tmp_path: Path) -> None:
    out, recipe = llama[1].path, tiny_recipe(checkpoint)
    shutil.copytree(out, tmp_path / "b")
    built = build(recipe, tmp_path / "b", Silent())
    assert built.is_reused
    pins = Pins(tmp_path / "tiny.lock.json", lock_of(built.ingredients, built.bundle.manifest))
    assert build(recipe, tmp_path / "b", Silent(), pins=pins).is_reused
    with pytest.raises(BuildError, match="locks another build: recipe is"):
        build(dataclasses.replace(recipe, kv_cache="int8"), tmp_path / "b", Silent(), pins=pins)
    forged = dataclasses.replace(pins, lock=dataclasses.replace(pins.lock, graphs="0" * 64))
    with pytest.raises(BuildError, match=f"locks graphs with digest {'0' * 16}"):
        build(recipe, tmp_path / "c", Silent(), pins=forged)
    assert not (tmp_path / "c").exists()
    cache = BuildCache(tmp_path / "cache")
    cache.keep(built.bundle)
    with pytest.raises(BuildError, match=f"locks graphs with digest {'0' * 16}"):
        build(recipe, tmp_path / "c", Silent(), pins=forged, bundles=cache)
    assert not (tmp_path / "c").exists()
    assert build(recipe, tmp_path / "c", Silent(), pins=pins, bundles=cache).is_cached
    assert out.exists()


def test_the_command_locks_and_holds_to_it(
    llama: Pair, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "tiny.toml"
    limits = "\n".join(f"{key} = {list(v) if isinstance(v, tuple) else v}" for key, v in _limits(llama).items())
    recipe.write_text(f'checkpoint = "{checkpoint}"\ntarget = "cpu"\n[limits]\n{limits}\n')
    shutil.copytree(llama[1].path, tmp_path / "b")
    argv = [str(recipe), "--out", str(tmp_path / "b"), "--no-cache"]
    with pytest.raises(BuildError, match="no lock at"):
        build_command([*argv, "--locked"])
    assert build_command([*argv, "--lock"]) == 0
    lock = read_pins(lock_path(recipe)).lock
    assert (
        f"locked in {tmp_path / 'tiny.lock.json'}: identity {lock.identity:.16}, checkpoint " in capsys.readouterr().out
    )
    assert lock.identity == open_bundle(tmp_path / "b").manifest.identity
    assert lock.checkpoint == ingredients_of(tiny_recipe(checkpoint), checkpoint).checkpoint
    assert build_command([*argv, "--locked"]) == 0
    with pytest.raises(BuildError, match=r"tiny\.lock\.json locks another build: recipe is .*; identity is"):
        build_command([*argv, "--locked", "--set", "limits.max_context=90"])


def _limits(llama: Pair) -> dict[str, object]:
    return dataclasses.asdict(llama[1].manifest.limits)

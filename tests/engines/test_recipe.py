"""Recipes: a file, overrides, and every refusal says what to give instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.engines.errors import RecipeError
from ostinato.engines.recipe import read_recipe

TEXT = """
checkpoint = "package:some-model==1.0"
target = "cpu"
weights = "int8"
[limits]
max_rows = 8
max_context = 256
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(TEXT)
    return file


def test_defaults_fill_in(path: Path) -> None:
    recipe = read_recipe(path)
    assert (recipe.name, recipe.weights, recipe.kv_cache, recipe.sha256) == ("small", "int8", "float32", "")
    assert recipe.limits.row_buckets == (1, 2, 4, 8)
    assert recipe.limits.token_buckets[-1] == recipe.limits.max_step_tokens == 512
    assert recipe.limits.kv_tokens == 16384


def test_set_overrides_strings_numbers_lists_and_tables(path: Path) -> None:
    overrides = ["weights=int4", 'kv_cache="int8"', "limits.max_rows=4", "limits.row_buckets=[1, 4]", "name=other"]
    recipe = read_recipe(path, overrides)
    assert (recipe.name, recipe.weights, recipe.kv_cache) == ("other", "int4", "int8")
    assert (recipe.limits.max_rows, recipe.limits.row_buckets) == (4, (1, 4))


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("weights", "write --set key=value"),
        ("=int8", "write --set key=value"),
        ("weights=int3", "'int3'.*float32, bfloat16, int8, int4"),
        ("target=tpu", "'tpu'.*cpu"),
        ("kv_cache=8", "kv_cache is 8: give a string"),
        ("colour=red", "unknown recipe key colour"),
        ("limits.rows=3", "unknown limits key rows"),
        ("limits=5", "limits is 5: give a table"),
        ("limits=[]", "give a table"),
        ("limits.max_rows=many", "give a whole number"),
        ("limits.max_rows=true", "give a whole number"),
        ("limits.max_rows=0", "give 1 or more"),
        ("limits.row_buckets=3", "give a list of counts"),
        ("limits.row_buckets=[4, 2, 8]", "ascending"),
        ("limits.row_buckets=[1, 16]", "end with 8"),
        ("limits.max_step_tokens=4", "below max_rows"),
        ("limits.kv_tokens=100", "does not fit the pool"),
        ("name.first=x", "name is not a table"),
        ("name=a/b", "plain folder name"),
    ],
)
def test_a_bad_override_is_refused(path: Path, override: str, wanted: str) -> None:
    path.write_text(f'name = "small"\n{TEXT}')
    with pytest.raises(RecipeError, match=wanted):
        read_recipe(path, [override])


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("weights=float32", "weights .target x86. is 'float32': give one of int8, int4"),
        ("kv_cache=float16", "kv_cache .target x86. is 'float16': give one of int8$"),
        ("limits.block_size=16", "block_size is 16, the kernels of target x86 take blocks of 32: give 32"),
        ("shards.tensor_parallel=2", "target x86 has one rank and no GPU"),
        ("gpu=l4", "target x86 has one rank and no GPU"),
        ('compute_capabilities=["8.9"]', "give one of none"),
    ],
)
def test_what_x86_kernels_can_not_do_is_refused_when_the_recipe_is_read(path: Path, override: str, wanted: str) -> None:
    x86 = ["target=x86", "kv_cache=int8"]
    assert read_recipe(path, x86).target == "x86"
    with pytest.raises(RecipeError, match=wanted):
        read_recipe(path, [*x86, override])


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("tensorrt.weight_streaming=true", "weight_streaming allocates"),
        ("tensorrt.hardware_compatibility=ampere_plus", "hardware_compatibility is ampere_plus.*drop it"),
        ("tensorrt.operators=inside", "give 'between'"),
        ("tensorrt.timing_cache_sha256=abc", "stands without timing_cache"),
        ('compute_capabilities=["8.6", "8.9", "8.6"]', "names 8.6 more than once"),
        ('compute_capabilities=["9.0"]', "give one of 8.0, 8.6"),
    ],
)
def test_what_rtx_can_not_build_is_refused_when_the_recipe_is_read(tmp_path: Path, override: str, wanted: str) -> None:
    path = tmp_path / "rtx.toml"
    path.write_text('checkpoint = "model"\ntarget = "rtx"\ncompute_capabilities = ["8.6"]\n')
    assert read_recipe(path).target == "rtx"
    with pytest.raises(RecipeError, match=wanted):
        read_recipe(path, [override])


def test_a_missing_file_bad_toml_and_missing_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe at"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(RecipeError, match=r"is a folder, wanted is a recipe: give its TOML file"):
        read_recipe(tmp_path)
    bad = tmp_path / "bad.toml"
    bad.write_text("weights = int8")
    with pytest.raises(RecipeError, match="is not TOML"):
        read_recipe(bad)
    bad.write_bytes(b"name = '\xff'")
    with pytest.raises(RecipeError, match=r"is not TOML.*utf-8"):
        read_recipe(bad)
    bad.write_text('target = "cpu"')
    with pytest.raises(RecipeError, match="no checkpoint"):
        read_recipe(bad)


def test_a_checkpoint_path_is_relative_to_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipes" / "own.toml"
    file.parent.mkdir()
    file.write_text('checkpoint = "../weights"\ntarget = "cpu"')
    assert read_recipe(file).checkpoint == str(tmp_path / "weights")


def test_the_recipes_that_ship_are_sound() -> None:
    recipes = sorted((Path(__file__).parent.parent.parent / "engines" / "recipes").glob("*.toml"))
    assert recipes
    for path in recipes:
        assert read_recipe(path).name == path.stem

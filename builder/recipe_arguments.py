"""What the commands about a recipe are told of it (once per call)."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from ostinato.engines import recipe as recipes
from ostinato.engines.errors import BuildError
from ostinato.engines.manifest import Manifest

RECIPES = Path(recipes.__file__).parent / "recipes"


def add_recipe(parser: ArgumentParser, default: Path | None = None, *, or_bundle: bool = False) -> None:
    """RECIPE and --set. `default`: the recipe where none is given."""
    told = ", such as engines/recipes/….toml" if default is None else f" (default: engines/recipes/{default.name})"
    if or_bundle:
        told += ", or the bundle of one there"
    parser.add_argument(
        "recipe",
        type=Path,
        nargs="?" if default else None,
        default=default,
        metavar="RECIPE|BUNDLE" if or_bundle else "RECIPE",
        help=f"a TOML file{told}",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one key of the recipe, such as limits.max_rows=8; may be given again",
    )


def recipe_for(manifest: Manifest, bundle: Path) -> Path:
    """The recipe of `engines/recipes` that has the bundle's name, or that and its target's. BuildError without one."""
    for name in (f"{manifest.name}-{manifest.target}", manifest.name):
        if (RECIPES / f"{name}.toml").is_file():
            return RECIPES / f"{name}.toml"
    raise BuildError(
        f"{bundle} does not say where its checkpoint is, and engines/recipes has no {manifest.name}.toml: give the "
        f"recipe that made it, as in `ostinato verify RECIPE --bundle {bundle}`"
    )


def add_config(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the model's config.json, in place of the recipe's checkpoint"
    )

"""What the commands about a recipe are told of it (once per call)."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path


def add_recipe(parser: ArgumentParser, default: Path | None = None) -> None:
    """RECIPE and --set. `default`: the recipe where none is given."""
    told = ", such as engines/recipes/….toml" if default is None else f" (default: engines/recipes/{default.name})"
    parser.add_argument(
        "recipe",
        type=Path,
        nargs="?" if default else None,
        default=default,
        metavar="RECIPE",
        help=f"a TOML file{told}",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one key of the recipe, such as limits.max_rows=8; may be given again",
    )


def add_config(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the model's config.json, in place of the recipe's checkpoint"
    )

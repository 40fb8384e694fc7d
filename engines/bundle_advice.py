"""What stands where a bundle was wanted, and what to do about it (when one is refused)."""

from __future__ import annotations

from pathlib import Path

from .errors import RecipeError
from .manifest import FILE_NAME
from .recipe import read_recipe


def why_no_bundle(path: Path, store: Path) -> str:
    """For a path without a manifest, a line that is complete on its own. `store`: where bundles are built by default.

    People give the recipe, the checkpoint, the folder above, or a bundle's bare name.
    """
    if path.is_dir():
        return _why_not(path)
    if path.suffix == ".gguf" and path.is_file():
        return _is_checkpoint(path)
    if path.is_file():
        return _is_file(path, store)
    if _is_bundle(store / path.name):
        return f"no bundle at {path}: give {as_typed(store / path.name)}"
    return f"no bundle at {path}: build one with `ostinato build RECIPE --out {path}`"


def _why_not(folder: Path) -> str:
    if (folder / "config.json").is_file():
        return _is_checkpoint(folder)
    if held := [entry for entry in sorted(folder.iterdir()) if _is_bundle(entry)]:
        return f"{folder} is a folder of bundles: give one of them, such as {held[0]}"
    return (
        f"{folder} has no {FILE_NAME}, so it is no finished bundle: give the folder of one, such as "
        "engines/store/NAME, or build it again"
    )


def _is_checkpoint(path: Path) -> str:
    return f"{path} is a checkpoint, wanted is a bundle: write a recipe with checkpoint = '{path}', and build that"


def _is_file(path: Path, store: Path) -> str:
    try:
        bundle = store / read_recipe(path).name
    except RecipeError:
        return f"{path} is a file, wanted is a bundle: give its folder, such as engines/store/NAME"
    if _is_bundle(bundle):
        return f"{path} is a recipe, wanted is its bundle: give {as_typed(bundle)}"
    return f"{path} is a recipe, and its bundle is not built: run `ostinato build {path}`, then give {as_typed(bundle)}"


def _is_bundle(folder: Path) -> bool:
    return (folder / FILE_NAME).is_file()


def as_typed(path: Path) -> Path:
    """Relative where it lies below the working folder, as people type it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

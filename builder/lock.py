"""The lock file of a recipe: what its last build was made of, for builds that must not differ (offline).

`ostinato build RECIPE --lock` writes it beside the recipe; `--locked` refuses a build of anything else. Engine files
are not in it: two builds of one graph differ in them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ostinato.engines.errors import BuildError, BundleError
from ostinato.engines.facts import graph_facts
from ostinato.engines.json_record import bounded_text, json_table, record_from
from ostinato.engines.manifest import Manifest, digest_of

from .identity import Ingredients


@dataclass(frozen=True)
class Lock:
    """All digests are SHA-256. `graphs`: digest of the graphs of all ranks, known only when they are made."""

    identity: str
    recipe: str
    checkpoint: str
    timing_cache: str
    sources: str
    machine: str
    toolchain: Mapping[str, str]
    graphs: str

    def told(self) -> str:
        """What it holds a build to, as one line."""
        digests = ("identity", "checkpoint", "recipe", "sources", "graphs")
        pinned = ", ".join(f"{name} {getattr(self, name):.16}" for name in digests)
        return f"{pinned}, versions of {len(self.toolchain)} packages, {self.machine}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def lock_path(recipe: Path) -> Path:
    """`NAME.toml` → `NAME.lock.json` beside it."""
    return recipe.with_name(f"{recipe.stem}.lock.json")


def lock_of(ingredients: Ingredients, manifest: Manifest) -> Lock:
    """What a finished build is to be held to."""
    return Lock(**_pinned(ingredients), toolchain=ingredients.toolchain, graphs=_graphs_digest(manifest))


def write_lock(path: Path, lock: Lock) -> None:
    """Put the lock in place with one rename. Raises BuildError where it can't be written."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(lock.to_json())
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise BuildError(
            f"the bundle is built, but its lock {path} can't be written ({error.strerror}): mend that, and build again "
            "with --lock"
        ) from None


@dataclass(frozen=True)
class Pins:
    """A lock read from `path`, and what a build is refused for."""

    path: Path
    lock: Lock

    def check_ingredients(self, ingredients: Ingredients) -> None:
        """Before a build. Raises BuildError that lists all that is not as locked."""
        found, locked = _pinned(ingredients), asdict(self.lock)
        odd = [f"{key} is {found[key]:.16}, locked is {locked[key]:.16}" for key in found if found[key] != locked[key]]
        odd += _odd_versions(ingredients.toolchain, self.lock.toolchain)
        if odd:
            raise BuildError(
                f"{self.path} locks another build: {'; '.join(odd)}; restore what is locked, or lock anew with --lock"
            )

    def check_graphs(self, manifest: Manifest) -> None:
        """Before a bundle is published. Raises BuildError where the build made other graphs than the locked one."""
        if (found := _graphs_digest(manifest)) != self.lock.graphs:
            raise BuildError(
                f"{self.path} locks graphs with digest {self.lock.graphs:.16}, this build of the same sources made "
                f"{found:.16}: find what does not repeat, or lock anew with --lock"
            )


def read_pins(path: Path) -> Pins:
    """Raises BuildError where there is no lock, or it does not read."""
    if not path.is_file():
        raise BuildError(f"no lock at {path}: write one with `ostinato build RECIPE --lock`, and commit it")
    try:
        return Pins(path, record_from(Lock, json_table(bounded_text(path), path), path))
    except BundleError as error:
        raise BuildError(f"{error} with --lock") from None


def _graphs_digest(manifest: Manifest) -> str:
    return digest_of(graph_facts(manifest))


def _pinned(ingredients: Ingredients) -> dict[str, str]:
    return {
        "recipe": digest_of(ingredients.recipe),
        "checkpoint": ingredients.checkpoint,
        "timing_cache": ingredients.timing_cache,
        "sources": ingredients.sources,
        "machine": ingredients.machine,
        "identity": ingredients.identity,
    }


def _odd_versions(found: Mapping[str, str], locked: Mapping[str, str]) -> Iterator[str]:
    for package in sorted({*found, *locked}):
        pair = found.get(package, "not used"), locked.get(package, "not used")
        if pair[0] != pair[1]:
            yield f"{package} is {pair[0]}, locked is {pair[1]}"

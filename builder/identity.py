"""The identity of a bundle: a digest of everything that decides its bytes, found without loading a weight (offline)."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ostinato.engines
import ostinato.plugins
from ostinato.engines.manifest import digest_of, file_digest
from ostinato.engines.recipe import Recipe

from .c_compiler import SOURCES
from .checkpoint import checkpoint_digest

TOOLCHAIN = (
    "gguf", "numpy", "onnx", "onnx-ir", "onnxscript", "ostinato", "safetensors", "tokenizers", "torch", "transformers",
)  # fmt: skip
TARGET_TOOLCHAIN = {
    "cpu": (),
    "x86": ("ziglang",),
    "rtx": ("triton", "tensorrt-rtx-cu13"),
    "trt": ("triton", "tensorrt-cu13"),
}
_ABSENT = "not installed"  # the target itself says what to do about it
_BY_CONTENT = ("checkpoint", "sha256")  # the checkpoint counts by what it holds, not by where it lies


@dataclass(frozen=True)
class Ingredients:
    """What decides a bundle's bytes. `recipe`: as a table, places of files left out.

    `timing_cache`: its pinned digest, or "" where none is used. `sources`: the digest of every source of the
    rooms that a bundle comes from. `machine`: the kind of processor.
    """

    checkpoint: str
    recipe: Mapping[str, Any]
    timing_cache: str
    sources: str
    toolchain: Mapping[str, str]
    machine: str

    @property
    def identity(self) -> str:
        """Equal identities mean equal bundles."""
        return digest_of(asdict(self))


def ingredients_of(recipe: Recipe, source: Path) -> Ingredients:
    """Read everything that counts: the whole checkpoint once, and no weight of it."""
    table = {key: value for key, value in asdict(recipe).items() if key not in _BY_CONTENT}
    timing_cache = recipe.tensorrt.timing_cache_sha256
    table["tensorrt"] = {k: v for k, v in table["tensorrt"].items() if not k.startswith("timing_cache")}
    return Ingredients(
        checkpoint=checkpoint_digest(source),
        recipe=table,
        timing_cache=timing_cache,
        sources=digest_of(_source_digests()),
        toolchain=toolchain_versions(recipe.target),
        machine=platform.machine(),
    )


def toolchain_versions(target: str = "cpu") -> dict[str, str]:
    """Package → version of everything that takes part in a build for the target."""
    return {name: _version(name) for name in (*TOOLCHAIN, *TARGET_TOOLCHAIN[target])}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _ABSENT


def _source_digests() -> dict[str, str]:
    """Every Python file of the rooms that a bundle comes from, and the kernels in C."""
    folders = [Path(__file__).parent, *map(Path, (*ostinato.engines.__path__, *ostinato.plugins.__path__))]
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    files += sorted(SOURCES.glob("*.[ch]"))
    return {f"{file.parent.name}/{file.name}": file_digest(file).sha256 for file in files}

"""The identity of a bundle: a digest of everything that decides its bytes, found without loading a weight (offline)."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import ostinato.engines
import ostinato.plugins
from ostinato.engines.manifest import digest_of, file_digest
from ostinato.engines.recipe import Recipe

from .checkpoint import checkpoint_digest

TOOLCHAIN = (
    "gguf", "numpy", "onnx", "onnx-ir", "onnxscript", "ostinato", "safetensors", "tokenizers", "torch", "transformers",
)  # fmt: skip
_BY_CONTENT = ("checkpoint", "sha256")  # the checkpoint counts by what it holds, not by where it lies


def toolchain_versions() -> dict[str, str]:
    """Package → version of everything that takes part in a build."""
    return {name: version(name) for name in TOOLCHAIN}


def bundle_identity(recipe: Recipe, source: Path) -> str:
    """Equal identities mean equal bundles."""
    return digest_of(
        {
            "checkpoint": checkpoint_digest(source),
            "recipe": {key: value for key, value in asdict(recipe).items() if key not in _BY_CONTENT},
            "sources": _source_digests(),
            "toolchain": toolchain_versions(),
            "machine": platform.machine(),
        }
    )


def _source_digests() -> dict[str, str]:
    """Every Python file of the rooms that a bundle comes from."""
    folders = [Path(__file__).parent, *map(Path, (*ostinato.engines.__path__, *ostinato.plugins.__path__))]
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    return {f"{file.parent.name}/{file.name}": file_digest(file).sha256 for file in files}

"""The digest of the operators' sources: a bundle's kernels and plugins fit the ones it was built with (at start)."""

from __future__ import annotations

from pathlib import Path

from ostinato.engines.manifest import digest_of, file_digest


def source_digest(folder: Path = Path(__file__).parent) -> str:
    """SHA-256 over every Python file of the room, by name and content."""
    return digest_of({file.name: file_digest(file).sha256 for file in folder.glob("*.py")})

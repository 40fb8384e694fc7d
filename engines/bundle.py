"""A bundle on disk: published atomically by the builder (offline), opened and checked by the runtime (once at start).

NAME/
  manifest.json     what it is, what it needs, a digest of every other file
  tokenizer/        tokenizer.json, tokenizer_config.json
  rank0/            model.onnx, weights.bin   (one folder a rank)
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import BundleError
from .manifest import FILE_NAME, FileDigest, Manifest, file_digest, manifest_from_json

STORE = Path(__file__).parent / "store"
_UNFINISHED = ".building-"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def tokenizer_dir(self) -> Path:
        return self.path / "tokenizer"

    def rank_dir(self, rank: int = 0) -> Path:
        return self.path / f"rank{rank}"


def open_bundle(path: Path, *, verify_digests: bool = True) -> Bundle:
    """Open a bundle, checking that every file is whole and that this machine fits.

    Raises BundleError that says what was found, what is needed and what to run.
    """
    manifest_path = path / FILE_NAME
    if not path.is_dir():
        raise BundleError(f"no bundle at {path}: build one with `ostinato build RECIPE --out {path}`")
    if not manifest_path.is_file():
        raise BundleError(f"{path} has no {FILE_NAME}, so it is no finished bundle: build it again")
    manifest = manifest_from_json(manifest_path.read_text(), manifest_path)
    _check_machine(manifest)
    for name, expected in manifest.files.items():
        _check_file(path / name, expected, verify_digests)
    return Bundle(path, manifest)


def _check_machine(manifest: Manifest) -> None:
    wanted, found = manifest.hardware.get("machine"), platform.machine()
    if wanted and wanted != found:
        raise BundleError(f"the bundle was built for {wanted}, this machine is {found}: build it here")


def _check_file(path: Path, expected: FileDigest, verify_digest: bool) -> None:
    if not path.is_file():
        raise BundleError(f"{path} is missing: build the bundle again")
    if path.stat().st_size != expected.size_bytes:
        raise BundleError(
            f"{path} has {path.stat().st_size} bytes, the manifest says {expected.size_bytes}: build the bundle again"
        )
    if verify_digest and (found := file_digest(path).sha256) != expected.sha256:
        raise BundleError(f"{path} has digest {found}, the manifest says {expected.sha256}: build the bundle again")


@contextmanager
def unfinished_bundle(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, under a lock that refuses a second builder; removed unless it was published."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock_path = path.parent / f".{path.name}.lock"
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BundleError(f"another build of {path} is running (it holds {lock_path}): wait for it") from None
        # We hold the lock, so whatever a killed build left beside it is nobody's.
        folder = path.parent / f"{_UNFINISHED}{path.name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def list_files(folder: Path) -> dict[str, FileDigest]:
    """Digests of every file in an unfinished bundle, by relative path."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != FILE_NAME)
    return {file.relative_to(folder).as_posix(): file_digest(file) for file in files}


def publish(folder: Path, path: Path, manifest: Manifest) -> Bundle:
    """Write the manifest last, flush everything to disk, and put the folder in place with one rename."""
    (folder / FILE_NAME).write_text(manifest.to_json())
    for file in [*folder.rglob("*"), folder]:
        _flush(file)
    if path.exists():
        if not (path / FILE_NAME).is_file():
            raise BundleError(f"{path} exists and is no bundle: give another --out, or remove it")
        old = path.parent / f"{_UNFINISHED}{path.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        folder.rename(path)
        shutil.rmtree(old)
    else:
        folder.rename(path)
    _flush(path.parent)
    return Bundle(path, manifest)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

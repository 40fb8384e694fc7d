"""A bundle on disk: published atomically by the builder (offline), opened and checked by the runtime (once at start).

NAME/
  manifest.json     what it is, what it needs, a digest of every other file
  tokenizer/        tokenizer.json, tokenizer_config.json
  rank0/            one folder a rank. cpu: model.onnx, weights.bin; x86: kernels.so, weights.bin, decoder.json;
                    GPU targets: engines, kernels, program.json
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .bundle_advice import why_no_bundle
from .decoder_record import DecoderRecord, read_decoder
from .errors import BundleError
from .fit import check_architecture
from .json_record import bounded_text
from .manifest import FILE_NAME, FileDigest, Manifest, file_digest, read_manifest
from .program import FILE_NAME as PROGRAM
from .program import Program, program_from_json

STORE = Path(__file__).parent / "store"
_UNFINISHED = ".building-"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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

    def decoder(self) -> DecoderRecord:
        """Where the weights lie; target x86 only. Raises BundleError if it does not read as such a record."""
        return read_decoder(self.rank_dir())

    def program(self, rank: int = 0) -> Program:
        """What the rank does in a step; GPU targets only. Raises BundleError if it does not read as a program."""
        path = self.rank_dir(rank) / PROGRAM
        return program_from_json(bounded_text(path), path)


def open_bundle(path: Path, *, verify_digests: bool = True, any_machine: bool = False) -> Bundle:
    """Open a bundle, checking that every file is whole, that there is no other, and that this kind of processor fits
    (unless `any_machine`); `engines.fit` says whether the GPU, or the processor's instructions, do.

    A file that the manifest does not list is refused, wherever it lies: loaders find tokenizer files and kernels by
    name, so a stray one could be taken for the bundle's own. So is everything that is neither file nor folder, links
    included: they could lead out of the bundle.

    Raises BundleError that says what was found, what is needed and what to run.
    """
    manifest_path = path / FILE_NAME
    if not manifest_path.is_file():
        raise BundleError(why_no_bundle(path, STORE))
    manifest = read_manifest(manifest_path)
    if not any_machine:
        check_architecture(manifest, platform.machine())
    found = _files_in(path)
    _check_ranks(path, manifest)
    for name in sorted(manifest.files):
        if name not in found:
            raise BundleError(f"{path / name} is missing: build the bundle again")
    if strangers := sorted(found - set(manifest.files) - {FILE_NAME}):
        raise BundleError(
            f"{path} holds {len(strangers)} files that its manifest does not list, such as {strangers[0]!r}: remove "
            "them, or build the bundle again"
        )
    for name in sorted(manifest.files):
        _check_file(path, name, manifest.files, verify_digests)
    return Bundle(path, manifest)


def _files_in(path: Path) -> set[str]:
    """Relative paths of all files, found without following a link."""
    found = set()
    try:
        for folder, folders, names in os.walk(path, onerror=_raise):
            for name in (*folders, *names):
                entry = Path(folder, name)
                kind = entry.lstat().st_mode
                if stat.S_ISREG(kind):
                    found.add(entry.relative_to(path).as_posix())
                elif not stat.S_ISDIR(kind):
                    raise BundleError(
                        f"{entry} is a link or a special file, wanted are plain files: build the bundle again"
                    )
    except OSError as error:
        raise BundleError(f"{path} can't be read ({error}): build the bundle again") from None
    return found


def _raise(error: OSError) -> None:
    raise error


def _check_ranks(path: Path, manifest: Manifest) -> None:
    """Every rank has files in the manifest and a folder on disk."""
    num_ranks = manifest.shards.num_ranks
    listed = {name.partition("/")[0] for name in manifest.files}
    for rank in range(num_ranks):
        if f"rank{rank}" not in listed:
            raise BundleError(
                f"{path / FILE_NAME} lists no file of rank {rank}, the bundle is for {num_ranks} ranks: build it again"
            )
        if not (path / f"rank{rank}").is_dir():
            raise BundleError(
                f"{path} has no folder rank{rank}, the bundle is for {num_ranks} ranks: copy that folder too, or build "
                "the bundle again"
            )


def _check_file(path: Path, name: str, files: Mapping[str, FileDigest], verify_digest: bool) -> None:
    file, expected = path / name, files[name]
    try:
        if (size := file.stat().st_size) != expected.size_bytes:
            raise BundleError(
                f"{file} has {size} bytes, the manifest says {expected.size_bytes}{_owner(file, name, files)}: "
                "build the bundle again"
            )
        if verify_digest and (found := file_digest(file).sha256) != expected.sha256:
            raise BundleError(
                f"{file} has digest {found}, the manifest says {expected.sha256}{_owner(file, name, files)}: "
                "build the bundle again"
            )
    except OSError as error:
        raise BundleError(f"{file} can't be read ({error}): build the bundle again") from None


def _owner(file: Path, name: str, files: Mapping[str, FileDigest]) -> str:
    """Which file of the bundle really lies there, if it is another one: rank folders are easily swapped."""
    size = file.stat().st_size
    if not any(other.size_bytes == size for other in files.values()):
        return ""
    digest = file_digest(file)
    owners = sorted(other for other, expected in files.items() if expected == digest)
    return f" (it is {owners[0]}, wanted is {name}: were folders swapped?)" if owners else ""


@contextmanager
def unfinished_bundle(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, under a lock that refuses a second builder; removed unless it was published.

    Raises BundleError if another builder holds the lock, if the place is taken or can't be written to, or if the disk
    is full; `path` is then as it was.
    """
    _refuse_taken(path)
    with _locked(path):
        # We hold the lock, so whatever a killed build left beside it is nobody's.
        folder = path.parent / f"{_UNFINISHED}{path.name}"
        _restore(path)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise BundleError(
                f"no room to write {path} ({error.strerror}): free some, or give another --out; nothing was left there"
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _refuse_taken(path: Path) -> None:
    """Before a build, not after it. A file in a bundle that it does not list, such as a lock, would spoil it."""
    if path.exists() and not (path / FILE_NAME).is_file():
        raise BundleError(f"{path} exists and is no bundle: give another --out, or remove it")
    for parent in path.absolute().parents:
        if (parent / FILE_NAME).is_file() and (parent / "rank0").is_dir():
            raise BundleError(f"{path} lies inside the bundle {parent}: give another --out")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock_path = path.parent / f".{path.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_path.open("w")
    except OSError as error:
        raise BundleError(f"{path.parent} can't be written to ({error.strerror}): give another --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BundleError(f"another build of {path} is running (it holds {lock_path}): wait for it") from None
        yield


def list_files(folder: Path) -> dict[str, FileDigest]:
    """Digests of every file in an unfinished bundle, by relative path."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != FILE_NAME)
    return {file.relative_to(folder).as_posix(): file_digest(file) for file in files}


def publish(folder: Path, path: Path, manifest: Manifest) -> Bundle:
    """Write the manifest last, then put the folder in place."""
    (folder / FILE_NAME).write_text(manifest.to_json())
    put_in_place(folder, path)
    return Bundle(path, manifest)


def put_in_place(folder: Path, path: Path) -> None:
    """Flush everything to disk, then one rename; a bundle that is there already is replaced."""
    for file in [*folder.rglob("*"), folder]:
        _flush(file)
    _refuse_taken(path)
    if path.exists():
        old = _replaced(path)
        path.rename(old)
        folder.rename(path)
        shutil.rmtree(old)
    else:
        folder.rename(path)
    _flush(path.parent)


def _replaced(path: Path) -> Path:
    """Where the bundle at `path` waits while a new one takes its place."""
    return path.parent / f"{_UNFINISHED}{path.name}.old"


def _restore(path: Path) -> None:
    """Put back a bundle that was set aside by a build that was killed before the new one was in place."""
    old = _replaced(path)
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

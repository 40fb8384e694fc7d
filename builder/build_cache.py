"""Finished bundles by identity, so that a recipe that was built before is not built again (offline).

A bundle is kept as hard links to its files, which take no room while the bundle itself is there; across file systems
it is copied. The least recently used entries go when the cache outgrows its bound. Entries are checked in full before
they are used: whoever writes into a published bundle writes into its entry too, and a damaged entry is dropped.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ostinato.engines.bundle import Bundle, open_bundle
from ostinato.engines.errors import BundleError

BUNDLES = Path.home() / ".cache" / "ostinato" / "bundles"
MAX_BYTES = 10 * 2**30
_UNFINISHED = ".unfinished"
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES)


@dataclass(frozen=True)
class BuildCache:
    """A folder of bundles named by their identity, shared by any number of builders."""

    folder: Path = BUNDLES
    max_bytes: int = MAX_BYTES

    def fetch(self, identity: str, folder: Path) -> bool:
        """Put the bundle of that identity into the empty `folder`; False if it is not here, or not whole any more.

        Raises BundleError where the cache folder can't be used.
        """
        if not self.folder.is_dir():
            return False
        try:
            return self._fetched(self.folder / identity, folder)
        except OSError as error:
            raise BundleError(
                f"the build cache {self.folder} can't be used ({error}): mend that, or give --no-cache"
            ) from None

    def _fetched(self, entry: Path, folder: Path) -> bool:
        with self._locked():
            if not entry.is_dir():
                return False
            _clone(entry, folder)
            os.utime(entry)
        if _is_whole(folder, entry.name):
            return True
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        with self._locked():
            shutil.rmtree(entry, ignore_errors=True)
        return False

    def keep(self, bundle: Bundle) -> None:
        """Add a published bundle. Raises BundleError where the cache folder can't take it."""
        identity = bundle.manifest.identity
        if _size(bundle.path) > self.max_bytes:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                entry, unfinished = self.folder / identity, self.folder / _UNFINISHED
                shutil.rmtree(unfinished, ignore_errors=True)  # of a killed builder: we hold the lock
                shutil.rmtree(entry, ignore_errors=True)  # the new one was checked last
                _clone(bundle.path, unfinished)
                unfinished.rename(entry)
                os.utime(entry)
                self._shrink(entry)
        except OSError as error:
            raise BundleError(
                f"{bundle.path} is built, but the build cache {self.folder} can't keep it ({error}): mend that, or "
                "give --no-cache"
            ) from None

    def _shrink(self, newest: Path) -> None:
        entries = sorted(
            (entry for entry in self.folder.iterdir() if entry.is_dir() and entry != newest),
            key=lambda entry: entry.stat().st_mtime_ns,
            reverse=True,
        )
        total = _size(newest)
        for entry in entries:
            total += _size(entry)
            if total > self.max_bytes:
                shutil.rmtree(entry)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Waits for other builders: nobody holds this longer than links or copies take."""
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _is_whole(folder: Path, identity: str) -> bool:
    try:
        return open_bundle(folder).manifest.identity == identity
    except BundleError:
        return False


def _clone(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for entry in sorted(source.rglob("*")):  # folders come before what is in them
        if entry.is_dir():
            (target / entry.relative_to(source)).mkdir()
        else:
            _link(entry, target / entry.relative_to(source))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())

"""Compiled kernel libraries by what they were compiled of, so that the next build need not compile them (offline).

An entry is a library behind its digest: one that was cut off or damaged is none. It is put in place with one rename, so
any number of builders may share the folder. The least recently used go when there are too many.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = Path.home() / ".cache" / "ostinato" / "kernels"
MAX_ENTRIES = 16  # of some 100 KB each
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class KernelCache:
    """A folder of libraries, each named by a digest of all that decides its bytes.

    What can't be read or written is passed over: then a build compiles, which only takes longer.
    """

    folder: Path = LIBRARIES

    def fetch(self, identity: str) -> bytes | None:
        """The library, or None if it is not here, or not whole."""
        entry = self.folder / identity
        with suppress(OSError):
            content = entry.read_bytes()
            digest, library = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if digest == hashlib.sha256(library).digest():
                os.utime(entry)
                return library
        return None

    def keep(self, identity: str, library: bytes) -> None:
        """Add what was just compiled."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".unfinished-", delete=False) as file:
                file.write(hashlib.sha256(library).digest() + library)
            os.replace(file.name, self.folder / identity)
            entries = sorted(self.folder.iterdir(), key=lambda entry: entry.stat().st_mtime_ns)
            for entry in entries[:-MAX_ENTRIES]:
                entry.unlink(missing_ok=True)

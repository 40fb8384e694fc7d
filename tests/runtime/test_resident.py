"""Memory leaves the process: a mapped file's pages, which come back unchanged, and what native code has freed."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np

from ostinato.runtime.resident import release_file_pages, release_freed_memory

NUM_BYTES = 64 * mmap.PAGESIZE


def resident_kib(path: Path) -> int:
    """Rss of the file's mappings, as the kernel counts it."""
    total, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef" and "-" in line.split()[0]:
            is_file = line.endswith(str(path))
        elif is_file and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_pages_are_given_back_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    content = np.random.default_rng(0).integers(0, 256, NUM_BYTES, np.uint8)
    path.write_bytes(content.tobytes())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert bytes(mapped) == content.tobytes()
        assert resident_kib(path) == NUM_BYTES // 1024
        assert release_file_pages(path) == NUM_BYTES
        assert resident_kib(path) == 0
        assert bytes(mapped) == content.tobytes()


def test_a_file_that_is_not_mapped_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(b"x")
    assert release_file_pages(path) == 0


def test_what_native_code_has_freed_is_given_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    pieces = [libc.malloc(4096) for _ in range(20_000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 4096)
    for number, piece in enumerate(pieces):
        if number % 100:  # one that is kept holds what lies below it
            libc.free(piece)
    held = anonymous_kib()
    release_freed_memory()
    assert held - anonymous_kib() > 50_000
    for piece in pieces[::100]:
        libc.free(piece)


def anonymous_kib() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1])

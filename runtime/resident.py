"""Gives memory back to the system that only the start needed (once, when ready)."""

from __future__ import annotations

import ctypes
from pathlib import Path

_MADV_DONTNEED = 4


def release_file_pages(path: Path) -> int:
    """Drop this process's resident pages of every mapping of `path`; returns the bytes mapped.

    A page that is read again comes back from the page cache, so this is safe at any time. Only read-only mappings are
    touched. Does nothing where there is no /proc.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return 0
    name, total = str(path.resolve()), 0
    libc = ctypes.CDLL(None, use_errno=True)
    for line in maps.read_text().splitlines():
        addresses, mode, _, _, _, *file = line.split(maxsplit=5)
        if file != [name] or "w" in mode:
            continue
        start, end = (int(part, 16) for part in addresses.split("-"))
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED) == 0:
            total += end - start
    return total


def release_freed_memory() -> None:
    """What native code has freed, such as the tables a tokenizer is made from: glibc keeps it for each thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

"""Weights outside the engines: each once in one file, bound as an input of every segment that reads it (offline)."""

from __future__ import annotations

from pathlib import Path

from .cut import Cut
from .half import Arrays
from .segment_model import append_aligned
from .weights import WEIGHT_FILE


def write_shared(cut: Cut, parameters: Arrays, folder: Path) -> tuple[dict[str, int], int]:
    """Put every shared parameter into weights.bin; returns where each lies, and their bytes together.

    Without any, no file is made.
    """
    offsets: dict[str, int] = {}
    total = 0
    if not cut.shared:
        return offsets, total
    with (folder / WEIGHT_FILE).open("wb") as file:
        for value in cut.shared:
            array = parameters[value.name]()
            offsets[value.name] = append_aligned(file, array)
            total += array.nbytes
    return offsets, total

"""The order in which people list names that hold numbers: "decode 2" before "decode 16" (once per call)."""

from __future__ import annotations

import re

_NUMBER = re.compile("([0-9]+)")


def natural_order(name: str) -> list[tuple[int, str]]:
    """A key for `sorted`; numbers without leading zeros, of any length."""
    pieces = _NUMBER.split(name)  # text and numbers take turns
    return [(len(piece) if index % 2 else 0, piece) for index, piece in enumerate(pieces)]

"""How much a heavy test does: a share in every run, all of it in a soak (read when a test is collected)."""

from __future__ import annotations

import os

import pytest

IS_SOAK = bool(os.environ.get("OSTINATO_SOAK"))
only_in_a_soak = pytest.mark.skipif(not IS_SOAK, reason="takes long, and smaller ones show the same: make soak runs it")


def scaled(usual: int, soak: int) -> int:
    """A count for `make test`, or the one for `make soak`."""
    return soak if IS_SOAK else usual

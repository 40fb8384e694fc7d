"""When Python looks for unreachable cycles: seldom, and not among what was made to start (called once, when ready)."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000  # a step makes some hundred, and nearly all die with it


def settle_garbage() -> None:
    """Leave what exists now out of every later search, and search less often: each search delays a step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 50)

"""Searches for garbage are rare once the model is ready, and still happen."""

from __future__ import annotations

import gc
import weakref

from ostinato.runtime.garbage import settle_garbage


class Cycle:
    def __init__(self) -> None:
        self.self = self


def test_cycles_that_come_later_are_still_found() -> None:
    before = gc.get_threshold()
    try:
        settle_garbage()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > before[0]
        lost = weakref.ref(Cycle())
        kept = [Cycle() for _ in range(2 * gc.get_threshold()[0])]
        assert lost() is None
        assert len(kept) == 2 * gc.get_threshold()[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)

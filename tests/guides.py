"""What most guides of tests have in common (called per step)."""

from __future__ import annotations


class Endless:
    """A guide that forces nothing and never ends."""

    def forced(self) -> tuple[int, ...]:
        return ()

    @property
    def has_ended(self) -> bool:
        return False

"""What a request's next token may be, beyond its parameters: the seam for grammars (called per step)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ostinato.plugins.sampling_rows import I32


class Guide(Protocol):
    """Follows one request. Called on the loop's thread alone; an error that it raises ends that request only."""

    def fill_mask(self, words: I32) -> None:
        """Write the mask of the next token, [W]: bit v % 32 of word v // 32."""
        ...

    def accept(self, token_id: int) -> None:
        """The request's next token."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that must come next and need not be sampled, each to be accepted like any other; often none."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether the output is whole and its end was accepted: nothing may follow."""
        ...

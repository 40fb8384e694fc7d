"""What a request's next token may be, beyond its parameters: the seam for grammars (called per step)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from ostinato.engines.errors import RequestError
from ostinato.plugins.sampling_rows import I32

logger = logging.getLogger(__name__)


class Guide(Protocol):
    """Follows one request. Called on the loop's thread alone; an error that it raises ends that request only.

    A RequestError is the caller's affair, who wrote what can't be followed; any other one is the server's.
    """

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


def log_failure(request_id: int, error: Exception) -> None:
    """Note that a guide raised, with the way there only where it is a fault of the server."""
    if isinstance(error, RequestError):
        logger.info("request %d ends: %s", request_id, error)
    else:
        logger.error("the guide of request %d failed", request_id, exc_info=error)

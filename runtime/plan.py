"""A step's decision by the scheduler: which tokens of which requests are computed and sampled (made per step)."""

from __future__ import annotations

from typing import NamedTuple

from .request import Request


class PlanRow(NamedTuple):
    """Tokens [start, end) of one request; logits of the last `num_sampled` of them are sampled.

    A row that ends at the request's last token samples its next one. Any earlier sampled position i only scores
    the prompt: it is forced to token i + 1.
    """

    request: Request
    start: int
    end: int
    num_sampled: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class Plan(NamedTuple):
    """At least one row: decode rows first, then prefill chunks."""

    rows: tuple[PlanRow, ...]
    num_tokens: int
    num_sampled: int

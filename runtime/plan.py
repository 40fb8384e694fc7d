"""A step's decision by the scheduler: which tokens of which requests are computed and sampled (made per step)."""

from __future__ import annotations

from typing import NamedTuple

from .request import Request

new_tuple = tuple.__new__  # a NamedTuple's own constructor takes twice as long, and there is one a row


class PlanRow(NamedTuple):
    """Tokens [start, end) of one request; logits of the last `num_sampled` of them are sampled.

    A row that ends at the request's last token samples its next one. Any earlier sampled position i only scores
    the prompt: it is forced to token i + 1. `fed_from`: -1, or the row's one token is not known yet: it is what the
    step before samples in that line.
    """

    request: Request
    start: int
    end: int
    num_sampled: int
    fed_from: int = -1

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class Plan(NamedTuple):
    """At least one row: decode rows first, then prefill chunks."""

    rows: tuple[PlanRow, ...]
    num_tokens: int
    num_sampled: int

    @property
    def num_rows(self) -> int:
        return len(self.rows)

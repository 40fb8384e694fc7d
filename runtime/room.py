"""What one step can still take: its budget of tokens and of sampled lines (made per step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import PlanRow
from .request import Request


@dataclass(slots=True)
class Room:
    """The rows that a step took so far, and the tokens and sampled lines that are left for more."""

    rows: list[PlanRow]
    num_tokens: int
    num_sampled: int
    pad_tokens: Sequence[int]  # by row count

    def add(self, request: Request) -> None:
        """The largest chunk of the request's tokens left that fits; nothing if none fits."""
        start = request.num_planned
        first = max(start, request.first_sampled)
        num_tokens = self.num_tokens - self.pad_tokens[len(self.rows) + 1]
        end = min(len(request.tokens), start + num_tokens, first + self.num_sampled)
        if end <= start:
            return
        num_sampled = max(0, end - first)
        self.rows.append(PlanRow(request, start, end, num_sampled))
        self.num_tokens -= end - start
        self.num_sampled -= num_sampled

"""A step's decision by the scheduler: which tokens of which requests are computed and sampled (made per step)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .request import Request

if TYPE_CHECKING:  # it makes plans
    from .steady import SteadyRows

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


class Plan:
    """At least one row: decode rows first, then prefill chunks.

    `steady`: the rows go on step after step, this plan being number `step` of theirs; then `rows` are made when
    somebody wants them one by one.
    """

    __slots__ = ("_rows", "num_rows", "num_sampled", "num_tokens", "steady", "step")

    def __init__(self, rows: tuple[PlanRow, ...], num_tokens: int, num_sampled: int) -> None:
        self.num_rows, self.num_tokens, self.num_sampled = len(rows), num_tokens, num_sampled
        self.steady: SteadyRows | None = None
        self.step = 0
        self._rows: tuple[PlanRow, ...] | None = rows

    @classmethod
    def of_steady(cls, steady: SteadyRows, step: int) -> Plan:
        """A token of each row, fed from the step before."""
        plan = object.__new__(cls)
        plan.num_rows = plan.num_tokens = plan.num_sampled = steady.num_rows
        plan.steady, plan.step, plan._rows = steady, step, None
        return plan

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        if self._rows is None:
            assert self.steady is not None, "a plan without rows"
            self._rows = self.steady.rows(self.step)
        return self._rows


def goes_on(request: Request, end: int) -> bool:
    """Whether a token follows the one that is sampled after `end` tokens, for all that is known before it is."""
    return end + 1 < request.num_prompt + request.max_tokens

"""The steps in flight: what each will have done to its requests, and the next one where nothing changes (per step)."""

from __future__ import annotations

from collections import deque

from ostinato.plugins.sampling_rows import Sampled

from .executor import StepRules
from .pages import Pages
from .plan import Plan, goes_on
from .request import Event, Request
from .steady import SteadyRows, steady_rows


class StepsInFlight:
    """Plans from their launch until they land, in order.

    While the same rows decode and nothing else happens, they are steady: a step is then planned and committed for all
    of them at once. It is the same step, with the same events, as without this; only what requests note of their
    progress lags behind until `settle`. Whoever changes a running request, or looks at it, settles first.
    """

    def __init__(self, rules: StepRules, pages: Pages, block_size: int) -> None:
        self._feeds = rules.feeds_tokens and rules.num_in_flight > 1
        self._pages, self._block_size = pages, block_size
        self._plans: deque[Plan] = deque()
        self._steady: SteadyRows | None = None

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def oldest(self) -> Plan:
        return self._plans[0]

    def launch(self, plan: Plan) -> None:
        """Note what the step will have done, and which rows the next one can be fed from it."""
        assert self._steady is None, "requests lag behind"
        self._plans.append(plan)
        feeds = self._feeds
        line = -1
        for request, _, end, num_sampled, fed_from in plan.rows:
            request.num_planned = end
            request.num_in_flight += 1
            line += num_sampled
            if feeds:
                ends_at_last = fed_from >= 0 or (end == len(request.tokens) and request.is_scored)
                request.pending_line = line if ends_at_last and goes_on(request, end) else -1

    def land(self, plan: Plan) -> None:
        assert self._steady is None, "requests lag behind"
        self._pop(plan)
        for row in plan.rows:
            request = row[0]
            request.num_in_flight -= 1
            if not request.num_in_flight:
                request.pending_line = -1

    def launch_steady(self, running: list[Request]) -> Plan | None:
        """The next step if it is the one in flight once more, a token later in each row; else None, nothing changed.

        `running`: whom a step may hold, in order; none else may start.
        """
        if not self._feeds or len(self._plans) != 1:
            return None
        steady = self._steady
        if steady is None:
            steady = steady_rows(self._plans[0], running, self._block_size)
            if steady is None:
                return None
            self._steady = steady
        step = steady.next_step
        if step > steady.num_steps:
            return None
        for row in steady.entering(step):
            if not self._pages.grow(steady.requests[row], steady.start(row, step) + 1):
                return None
        plan = steady.next_plan()
        self._plans.append(plan)
        return plan

    def commit_steady(self, plan: Plan, sampled: Sampled) -> list[Event] | None:
        """The events of a step that ends no row; else None, nothing changed."""
        steady = plan.steady
        if steady is None or steady is not self._steady:
            return None
        tokens: list[int] = sampled.tokens.tolist()
        if not steady.are_plain(plan.step, tokens):
            return None
        self._pop(plan)
        for row in steady.entering(plan.step + 1):  # its block is full
            request = steady.requests[row]
            request.num_computed = len(request.tokens)
            self._pages.register(request)
        return steady.take(tokens)

    def settle(self) -> None:
        """Let requests note how far they are, and rows go their own ways."""
        if self._steady is not None:
            self._steady.settle(len(self._plans))
            self._steady = None

    def _pop(self, plan: Plan) -> None:
        assert self._plans, "no step is in flight"
        assert plan is self._plans[0], "an older step is in flight"
        self._plans.popleft()

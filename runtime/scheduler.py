"""The scheduler: decides per step which tokens of which requests run, and takes the results in (runs per step).

A step holds, in this order: one token of every decoding row, chunks of rows still in their prompt, new rows.
A row that needs a block when none is free preempts the newest row of the lowest priority, maybe itself: that one
gives its blocks up, waits at the front of the line, and computes its prompt and output again when it returns.

Where several steps are in flight, step N + 1 is planned before the tokens of N are known: a row that N samples is fed
from it (`PlanRow.fed_from`), or waits for its turn where the executor feeds no tokens. What N then shows to be over
is dropped when N + 1 lands. Blocks come back when no step holds a row of their request. While rows decode and nothing
else happens, steps are planned and committed for all of them at once (`in_flight`).
"""

from __future__ import annotations

from bisect import insort

from ostinato.engines.errors import RequestError
from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import Sampled

from .admission import Admission
from .executor import StepRules
from .in_flight import StepsInFlight
from .outcome import SampledLines, apply_samples
from .pages import Pages
from .plan import Plan, PlanRow, new_tuple
from .request import Event, Request, Status
from .room import Room
from .timeline import Stage


class Scheduler:
    """Decides steps for one executor. One thread; `submit` and `abort` come anywhere.

    `plan` may be called while fewer than `rules.num_in_flight` steps are in flight; `commit` or `fail` takes the
    outcome of each in, in the order of the steps. `num_preemptions`, `num_prefix_queries` and `num_prefix_hits` (in
    tokens, at first admission) only grow.
    """

    def __init__(self, limits: Limits, pages: Pages, rules: StepRules) -> None:
        assert rules.num_in_flight <= 2 or not rules.feeds_tokens, "a step is fed from the one before it only"
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.pages = pages
        self._limits = limits
        self._rules = rules
        self._max_decoding = next(  # decode rows that a step holds with its pads
            (
                count
                for count in range(limits.max_rows)
                if count + 1 + rules.pad_tokens[count + 1] > limits.max_step_tokens
            ),
            limits.max_rows,
        )
        self.admission = Admission(limits, pages)
        self._line = self.admission.line
        self._running: list[Request] = []  # by priority, then by admission
        self._requests: dict[int, Request] = {}
        self._in_flight = StepsInFlight(rules, pages, limits.block_size)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def waiting_reason(self) -> str:
        """Why who waits has to, one of `timeline.REASONS`."""
        return self.admission.reason(len(self._running))

    @property
    def is_idle(self) -> bool:
        return not self._requests and not self._in_flight

    def submit(self, request: Request) -> Event | None:
        """Put a request in line; its only event if nothing is to be computed for it. `check_fits` comes first."""
        assert request.id not in self._requests, f"request {request.id} is already here"
        assert 0 < request.num_prompt == len(request.tokens) < self._limits.max_context, "call check_fits first"
        assert request.num_prompt + request.max_tokens <= self._limits.max_context, "call check_fits first"
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        elif request.max_tokens == 0:
            request.status = Status.FINISHED
            return Event(request.id, None, None, "length")
        self._requests[request.id] = request
        self._line.add(request)
        request.turn(Stage.QUEUE)
        self.admission.is_stuck = False
        return None

    def abort(self, request_id: int) -> Event | None:
        """End a request; its last event, or None if it had ended before.

        Its blocks come back at once, or when the last step in flight that holds a row of it has landed.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is Status.WAITING:
            self._line.leave(request_id)
            self._forget(request)
        else:
            self.settle()
            self._end([request])
        return Event(request_id, None, None, "abort", None, request.num_cached)

    def preempt(self, request: Request) -> None:
        """Take a running row's blocks back and let it wait at the front, its tokens kept."""
        assert not self._in_flight, "a step is running"
        self.settle()
        self._running.remove(request)
        self.pages.release(request)
        request.num_planned = 0
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.admission.preempted(request)
        request.turn(Stage.QUEUE)

    def settle(self) -> None:
        """Let requests note how far they are: before somebody looks at one that runs."""
        self._in_flight.settle()

    def plan(self) -> Plan | None:
        """The next step; None if there is nothing to do, or nothing before a step in flight has landed."""
        assert len(self._in_flight) < self._rules.num_in_flight, f"{len(self._in_flight)} steps are in flight"
        running, steps = self._running, self._in_flight
        if not self.admission.may_start(len(running)) and (plan := steps.launch_steady(running)) is not None:
            return plan
        self.settle()
        num_preemptions = self.num_preemptions
        rows = self._decoding()
        if not rows and not self._in_flight:  # nobody else wants the time
            rows = self._decoding(wakes=True)
        if rows is None:
            return None
        limits = self._limits
        room = Room(rows, limits.max_step_tokens - len(rows), limits.max_rows - len(rows), self._rules.pad_tokens)
        if len(rows) < len(self._running):
            for request in self._running:
                if len(request.tokens) - request.num_planned > 1 and self._may_plan(request):
                    room.add(request)
        if num_preemptions == self.num_preemptions:  # what was just preempted would only come back to be preempted
            for request in self.admission.starting(self._running, room):
                self._start(request)
                room.add(request)
        if not rows:
            assert self._in_flight or not self._requests, f"{len(self._line)} requests wait and none can run"
            return None
        plan = Plan(tuple(rows), limits.max_step_tokens - room.num_tokens, limits.max_rows - room.num_sampled)
        self._in_flight.launch(plan)
        return plan

    def commit(self, plan: Plan, sampled: Sampled) -> list[Event]:
        """Take a step's results in: at most one event a request, in the order of the plan's rows."""
        if (events := self._in_flight.commit_steady(plan, sampled)) is not None:
            return events
        self.settle()
        self._in_flight.land(plan)
        block_size, finished = self._limits.block_size, Status.FINISHED
        lines = SampledLines(sampled)
        events = []
        ended: list[Request] = []
        line = 0
        for row in plan.rows:
            request, start, end, num_sampled, _ = row
            if request.status is finished:  # meanwhile
                ended.append(request)
            elif start == request.num_computed:  # else the row that was to feed it was put off
                is_put_off = num_sampled > 0 and request.num_put_off > 0
                if is_put_off:  # its last token is computed again
                    end -= 1
                    request.num_planned, request.pending_line = end, -1
                request.num_computed = end
                if end // block_size > start // block_size:
                    self.pages.register(request)
                    self.admission.is_stuck &= start >= request.num_prompt  # a waiter may share the prompt
                if num_sampled and not is_put_off and (event := apply_samples(row, lines, line)) is not None:
                    events.append(event)
                    if event[3] is not None:
                        ended.append(request)
                        if event[4] is not None:
                            self.pages.forget(request)
            line += num_sampled
        self._end(ended)
        return events

    def fail(self, plan: Plan, error: RequestError) -> list[Event]:
        """End every row of a step that gave no results."""
        self.settle()
        self._in_flight.land(plan)
        requests = [row.request for row in plan.rows]
        live = [request for request in requests if request.status is not Status.FINISHED]
        self._end(requests)
        return [Event(request.id, None, None, "error", error, request.num_cached) for request in live]

    def fail_all(self, error: RequestError) -> list[Event]:
        """End every request, those that wait too; what is in flight will not land."""
        events: list[Event] = []
        while self._in_flight:
            events += self.fail(self._in_flight.oldest, error)
        for request in list(self._requests.values()):
            self.abort(request.id)
            events.append(Event(request.id, None, None, "error", error, request.num_cached))
        return events

    def _decoding(self, *, wakes: bool = False) -> list[PlanRow] | None:
        """One token of each row that computed all others; None if a block must be taken back and a step is in flight.

        Victims stand at the end, so they are not planned yet. Who has more to compute gets blocks here, too: the tokens
        that a guide forced came after its start. Who rests is left out, unless it `wakes` them.
        """
        rows: list[PlanRow] = []
        most, block_size = self._most_decoding(), self._limits.block_size
        for request in self._running:
            if request.num_rests and not wakes:
                request.num_rests -= 1
                continue
            start, line = request.num_planned, request.pending_line
            end = start + 1 if line >= 0 else len(request.tokens)
            if end == start or (line < 0 and not self._may_plan(request)):
                continue
            if end == start + 1 and len(rows) == most:
                continue
            if end > len(request.blocks) * block_size and not self._grow(request, end):
                if self._in_flight:
                    return None
                continue
            if end == start + 1:
                rows.append(new_tuple(PlanRow, (request, start, end, 1, line)))
        return rows

    def _most_decoding(self) -> int:
        """Decode rows that the step may hold. Where tokens are not fed, each step in flight gets a share of them."""
        rules = self._rules
        if rules.feeds_tokens or rules.num_in_flight == 1:
            return self._max_decoding
        count = sum(len(request.tokens) - request.num_planned <= 1 for request in self._running)
        return min(self._max_decoding, -(-count // rules.num_in_flight))

    def _may_plan(self, request: Request) -> bool:
        """Whether it may have a further row: a prompt that is scored goes on when what flies of it has landed."""
        return not request.num_in_flight or request.is_scored

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """A block for the row's next token; False if there is none, or the row itself had to be preempted."""
        while not self.pages.grow(request, num_tokens):
            if self._in_flight:
                return False
            victim = self._running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _start(self, request: Request) -> None:
        request.status = Status.RUNNING
        request.turn(Stage.PREFILL)
        request.is_catching_up = True
        request.num_planned = request.num_computed
        insort(self._running, request, key=lambda running: running.priority)
        if request.num_preemptions == 0:
            request.num_cached = request.num_computed
            if self.pages.prefix_caching and request.is_scored:
                self.num_prefix_queries += request.num_prompt
                self.num_prefix_hits += request.num_cached

    def _end(self, requests: list[Request]) -> None:
        """Forget requests; blocks that a step in flight still writes come back when it lands."""
        for request in requests:
            self._forget(request)
            if not request.num_in_flight:
                self.pages.release(request)
        if requests:
            self._running = [request for request in self._running if request.status is not Status.FINISHED]

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.id, None)
        request.status = Status.FINISHED
        self.admission.is_stuck = False

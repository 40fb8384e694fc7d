"""The scheduler: decides per step which tokens of which requests run, and takes the results in (runs per step).

A step holds, in this order: one token of every decoding row, chunks of rows still in their prompt, new rows.
A row that needs a block when none is free preempts the newest row of the lowest priority, maybe itself: that one
gives its blocks up, waits at the front of the line, and computes its prompt and output again when it returns.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from ostinato.engines.errors import RequestError
from ostinato.engines.sizes import Limits, bucket_for
from ostinato.plugins.sampling_rows import Sampled

from .outcome import SampledLines, apply_samples
from .pages import Pages
from .plan import Plan, PlanRow
from .request import Event, Request, Status
from .waiting import Waiter, WaitingLine, may_overtake


def check_fits(num_prompt: int, max_tokens: int | None, limits: Limits) -> int:
    """The number of output tokens a request may have; RequestError if it could never fit the context.

    `max_tokens` None means the rest of the context. Limits keep a context within the KV pool, so what passes here
    can always run to its end, if need be alone.
    """
    code = "context_length_exceeded"
    if num_prompt >= limits.max_context:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, the context holds {limits.max_context} with at least one of output: "
            "shorten the prompt",
            param="prompt",
            code=code,
        )
    rest = limits.max_context - num_prompt
    if max_tokens is not None and max_tokens > rest:
        raise RequestError(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, the context holds "
            f"{limits.max_context}: give max_tokens {rest} or less, or shorten the prompt",
            param="max_tokens",
            code=code,
        )
    return rest if max_tokens is None else max_tokens


@dataclass(slots=True)
class _Room:
    """What a step can still take, and what it took."""

    num_tokens: int
    num_sampled: int
    num_pads: list[int]  # by row count: pad rows up to the bucket, one token each
    rows: list[PlanRow] = field(default_factory=list)

    def add(self, request: Request) -> None:
        """The largest chunk of the request's tokens left that fits; nothing if none fits."""
        start = request.num_computed
        first = max(start, request.first_sampled)
        num_tokens = self.num_tokens - self.num_pads[len(self.rows) + 1]
        end = min(len(request.tokens), start + num_tokens, first + self.num_sampled)
        if end <= start:
            return
        num_sampled = max(0, end - first)
        self.rows.append(PlanRow(request, start, end, num_sampled))
        self.num_tokens -= end - start
        self.num_sampled -= num_sampled


class Scheduler:
    """Decides steps for one executor. One thread; `plan` and `commit` alternate, `submit` and `abort` come anywhere.

    `num_preemptions`, `num_prefix_queries` and `num_prefix_hits` (in tokens, at first admission) only grow.
    """

    def __init__(self, limits: Limits, pages: Pages) -> None:
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.pages = pages
        self._limits = limits
        self._num_pads = [bucket_for(count, limits.row_buckets) - count for count in range(limits.max_rows + 1)]
        self._line = WaitingLine()
        self._running: list[Request] = []  # by priority, then by admission
        self._requests: dict[int, Request] = {}
        self._in_flight: Plan | None = None
        self._is_stuck = False  # no waiter could start, and since then no block came back and nobody joined

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def is_idle(self) -> bool:
        return not self._requests

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
        self._is_stuck = False
        return None

    def abort(self, request_id: int) -> Event | None:
        """End a request; its last event, or None if it had ended before.

        Its blocks come back at once, or at `commit` if it is in the step that runs now.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is Status.WAITING:
            self._line.leave(request_id)
            self._forget(request)
        elif self._in_flight is not None and any(row.request is request for row in self._in_flight.rows):
            self._requests.pop(request_id)
            request.status = Status.FINISHED  # commit gives its blocks back
        else:
            self._end([request])
        return Event(request_id, None, None, "abort", None, request.num_cached)

    def preempt(self, request: Request) -> None:
        """Take a running row's blocks back and let it wait at the front, its tokens kept."""
        assert self._in_flight is None, "a step is running"
        self._running.remove(request)
        self.pages.release(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._line.add_front(request)
        self._is_stuck = False

    def plan(self) -> Plan | None:
        """The next step, or None if there is nothing to do."""
        assert self._in_flight is None, "a step is running"
        room = _Room(self._limits.max_step_tokens, self._limits.max_rows, self._num_pads)
        num_preemptions = self.num_preemptions
        self._add_decoding(room)
        for request in self._running:
            if len(request.tokens) - request.num_computed > 1:
                room.add(request)
        if num_preemptions == self.num_preemptions:  # what was just preempted would only come back to be preempted
            self._admit(room)
        if not room.rows:
            assert not self._requests, f"{len(self._line)} requests wait and none can run"
            return None
        limits = self._limits
        num_tokens, num_sampled = limits.max_step_tokens - room.num_tokens, limits.max_rows - room.num_sampled
        self._in_flight = Plan(tuple(room.rows), num_tokens, num_sampled)
        return self._in_flight

    def commit(self, plan: Plan, sampled: Sampled) -> list[Event]:
        """Take a step's results in: at most one event a request, in the order of the plan's rows."""
        assert plan is self._in_flight, "this is not the step that runs"
        self._in_flight = None
        lines = SampledLines(sampled)
        events: list[Event] = []
        ended: list[Request] = []
        line = 0
        for row in plan.rows:
            request = row.request
            if request.status is Status.FINISHED:  # aborted meanwhile
                ended.append(request)
            else:
                request.num_computed = row.end
                self.pages.register(request)
                event = apply_samples(row, lines, line) if row.num_sampled else None
                if event is not None:
                    events.append(event)
                    if event.finish is not None:
                        ended.append(request)
            line += row.num_sampled
        self._end(ended)
        return events

    def fail(self, plan: Plan, error: RequestError) -> list[Event]:
        """End every row of a step that gave no results."""
        assert plan is self._in_flight, "this is not the step that runs"
        self._in_flight = None
        requests = [row.request for row in plan.rows]
        live = [request for request in requests if request.status is not Status.FINISHED]
        self._end(requests)
        return [Event(request.id, None, None, "error", error, request.num_cached) for request in live]

    def _add_decoding(self, room: _Room) -> None:
        """One token of each row that computed all others. Victims stand at the end, so they are not planned yet."""
        index = 0
        while index < len(self._running):
            request = self._running[index]
            if len(request.tokens) - request.num_computed == 1 and self._grow(request):
                room.add(request)
            index += 1

    def _grow(self, request: Request) -> bool:
        """A block for the row's next token; False if the row itself had to be preempted."""
        while not self.pages.grow(request, len(request.tokens)):
            victim = self._running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _admit(self, room: _Room) -> None:
        """Start waiters while rows, tokens and blocks last. One that lacks blocks may be overtaken, within bounds."""
        if self._is_stuck:
            return
        blocked: list[Waiter] = []
        num_running = len(self._running)
        for waiter in self._line.ahead():
            if len(self._running) == self._limits.max_rows or not room.num_tokens or not room.num_sampled:
                return
            if blocked and not may_overtake(blocked):
                break
            # A free block for each running row keeps a new one from being preempted at once.
            if not self.pages.admit(waiter.request, headroom=len(self._running)):
                blocked.append(waiter)
                continue
            for other in blocked:
                other.num_overtaken += 1
            self._start(waiter.request)
            room.add(waiter.request)
        self._is_stuck = bool(blocked) and len(self._running) == num_running

    def _start(self, request: Request) -> None:
        self._line.leave(request.id)
        request.status = Status.RUNNING
        insort(self._running, request, key=lambda running: running.priority)
        if request.num_preemptions == 0:
            request.num_cached = request.num_computed
            if self.pages.prefix_caching and request.is_scored:
                self.num_prefix_queries += request.num_prompt
                self.num_prefix_hits += request.num_cached

    def _end(self, requests: list[Request]) -> None:
        for request in requests:
            self.pages.release(request)
            self._forget(request)
        if requests:
            self._running = [request for request in self._running if request.status is not Status.FINISHED]

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.id, None)
        request.status = Status.FINISHED
        self._is_stuck = False

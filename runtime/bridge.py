"""asyncio ⇄ loop thread: requests over, each step's events back in one hop (lines run per step)."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ostinato.engines.errors import OstinatoError, RequestError

from .call import Call
from .choice import ChoiceStream
from .engine_view import EngineView, look_at
from .grammar_guide import Grammar
from .grammars import Grammars
from .intake import Intake
from .latency_series import Latencies
from .ledger import Ledger
from .loop import Loop
from .metrics import Metrics
from .patience import LOOK_SECONDS, overdue
from .request import STEP_FAILED, Event, Request, SamplingParams
from .serve_limits import ServeLimits
from .stream import Stream
from .timeline import Snapshot, Timeline
from .tokenizer import Tokenizer

MAX_RETRY_SECONDS = 60
_WEIGHT = 0.1  # of the newest in the mean of seconds a choice takes

logger = logging.getLogger(__name__)


class BusyError(OstinatoError):
    """The waiting queue is full: try again later."""

    def __init__(self, message: str, retry_seconds: int) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class ClosedError(OstinatoError):
    """The server is draining or its loop has ended."""


class Prompt(NamedTuple):
    """One prompt of a call and how to go on from it."""

    token_ids: list[int]
    params: SamplingParams
    grammar: Grammar | None = None  # that each of its outputs is held to
    is_cut: bool = False  # shown without its last character, which is its outputs' even if it never completes


@dataclass(slots=True, eq=False)
class _Row:
    """A choice that is being made."""

    request: Request
    call: Call
    stream: Stream
    index: int
    choice: ChoiceStream
    submitted_at: float
    token_at: float | None = None


class Bridge:
    """Everything here runs on the asyncio thread, but for `emit` and `ended`, which the loop calls on its own."""

    def __init__(
        self,
        loop: Loop,
        intake: Intake,
        tokenizer: Tokenizer,
        metrics: Metrics,
        serve_limits: ServeLimits | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = intake.limits
        self.vocab_size = intake.vocab_size
        self.metrics = metrics
        self.serve_limits = serve_limits or ServeLimits()
        self.grammars = Grammars(tokenizer, intake.eos_ids, self.serve_limits)
        self.latencies = Latencies()
        self.ledger = Ledger(metrics, intake.limits, loop.rules)
        self._intake = intake
        self._loop = loop
        self._beat_seconds = self.serve_limits.beat_seconds / 2  # a stream is quiet if nothing came since the last beat
        self._max_rows = intake.limits.max_rows + self.serve_limits.max_waiting
        self._row_seconds = 1.0  # how long a choice is in its row of late, about
        self._rows: dict[int, _Row] = {}
        self._home: asyncio.AbstractEventLoop | None = None
        self._is_draining = False
        self._has_ended = False
        metrics.watch(loop.scheduler, lambda: loop.clock.reason)
        loop.observe_step = self.ledger.note_step
        loop.scheduler.admission.max_rows_per_tenant = self.serve_limits.max_rows_per_tenant

    def start(self) -> None:
        """Start the loop's thread; its events come to the asyncio loop that runs now."""
        self._home = asyncio.get_running_loop()
        self._home.call_later(self._beat_seconds, self._beat)
        self._home.call_later(LOOK_SECONDS, self._end_overdue)
        self._loop.start(self)

    async def close(self) -> str | None:
        """Stop the loop and release the executor; streams that are open fail. Tells why the loop failed, if it did."""
        self._is_draining = True
        trouble = self._loop.trouble()
        self.grammars.close()
        await asyncio.to_thread(self._loop.close)
        await asyncio.to_thread(self.ledger.close)
        return trouble

    def check_room(self, num_choices: int = 1) -> None:
        """Raises BusyError where the queue has no room for a call, ClosedError where nothing new is taken."""
        if self._is_draining or self._has_ended:
            raise ClosedError("the server is stopping" if self._is_draining else "the server has stopped")
        num_open = len(self._rows)
        if num_open + num_choices > self._max_rows:
            seconds = self._row_seconds * num_open / self.limits.max_rows
            raise BusyError(
                f"{num_open} choices are running or waiting already: try again later",
                min(MAX_RETRY_SECONDS, max(1, math.ceil(seconds))),
            )

    def submit(self, prompts: Sequence[Prompt], call: Call, *, salt: str = "", priority: int = 0) -> Stream:
        """Start all choices of one call; they are numbered through, prompt by prompt. `salt` is the caller's own wish.

        Raises RequestError where a prompt is not servable, BusyError on a full queue, ClosedError where nothing new is
        taken; then nothing was started.
        """
        self.check_room()
        salt = call.caller.salt + salt
        requests = [
            request
            for token_ids, params, grammar, _ in prompts
            for request in self._intake.requests(token_ids, params, salt=salt, priority=priority, grammar=grammar)
        ]
        self.check_room(len(requests))
        call.num_prompt = sum(len(prompt.token_ids) for prompt in prompts)
        stream = Stream(call, self._abort, self.serve_limits)
        call.leave = stream.cancel
        now = time.monotonic()
        are_cut = [prompt.is_cut for prompt in prompts for _ in range(prompt.params.n)]
        for index, (request, is_cut) in enumerate(zip(requests, are_cut, strict=True)):
            request.timeline, request.tenant = Timeline(self._loop.clock), call.caller.tenant
            call.timelines.append(request.timeline)
            choice = ChoiceStream(self.tokenizer, request.tokens, request.params, keeps_mark=is_cut)
            self._rows[request.id] = _Row(request, call, stream, index, choice, now)
            stream.open_ids.add(request.id)
        call.path.submitted()
        # Only now: from here on the loop's thread owns the requests' tokens.
        for request in requests:
            self._loop.submit(request)
        return stream

    def _abort(self, request_id: int) -> None:
        if (row := self._rows.pop(request_id, None)) is not None:
            self._loop.abort(request_id)
            self._leave(row, "abort", self._loop.clock.snap(), time.monotonic())

    def look(self) -> asyncio.Future[EngineView]:
        """The engine as it is between two steps; it comes when the step that runs has ended."""
        assert self._home is not None
        return look_at(self._loop, [row.request for row in self._rows.values()], self._home)

    def emit(self, events: list[Event]) -> None:
        """One hop a step, for all streams."""
        assert self._home is not None
        self._home.call_soon_threadsafe(self._dispatch, events, self._loop.clock.snap())

    def ended(self) -> None:
        """The loop's last word."""
        assert self._home is not None
        self._home.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._has_ended = True
        self._fail_all("the server has stopped")

    def _dispatch(self, events: list[Event], made: Snapshot) -> None:
        now, rows, num_tokens = time.monotonic(), self._rows, 0
        num_waiting: dict[float, int] = {}  # rows that were in the step before have waited equally long since
        for event in events:
            request_id, token_id, *_, forced = event
            num_tokens += (token_id is not None) + len(forced)
            # A row that was aborted may have an event under way.
            if (row := rows.get(request_id)) is not None:
                if token_id is not None:
                    if row.token_at is None:
                        self._count_first(row, now)
                    else:
                        num_waiting[row.token_at] = num_waiting.get(row.token_at, 0) + 1
                    row.token_at = now
                try:
                    self._take(row, event, made, now)
                except Exception:  # a fault in one answer must not take the other answers' events along
                    logger.exception("an event could not be handed on")
                    row.stream.fail(RequestError("the answer failed inside the server", code=STEP_FAILED))
        self.metrics.generation_tokens.inc(num_tokens)
        for since, count in num_waiting.items():
            self.metrics.between_tokens_seconds.observe(now - since, count)
            self.latencies.between_tokens.observe(now - since, count)

    def _take(self, row: _Row, event: Event, made: Snapshot, now: float) -> None:
        stream = row.stream
        if event.prompt_logprobs is not None:
            stream.prompt_logprobs[row.index] = event.prompt_logprobs
        delta = row.choice.push(event)
        if delta is None:
            return
        if delta.finish_reason is not None:
            self._end(row, delta.finish_reason, made, now)
            row.call.path.spent("detokenize")
        if delta.error is not None:
            stream.fail(delta.error)
        else:
            stream.add(row.index, delta)

    def _end(self, row: _Row, reason: str, made: Snapshot, now: float) -> None:
        del self._rows[row.request.id]
        row.stream.num_output += row.choice.completion_tokens
        if row.request.choice == 0:
            row.stream.num_cached += row.choice.num_cached
        if row.choice.wants_abort:
            self._loop.abort(row.request.id)
        self._leave(row, reason, made, now)

    def _count_first(self, row: _Row, now: float) -> None:
        row.call.first_token_at = row.call.first_token_at or now
        self.metrics.prompt_tokens.inc(row.request.num_prompt)
        self.metrics.first_token_seconds.observe(now - row.submitted_at)
        self.latencies.first_token.observe(now - row.submitted_at)

    def _leave(self, row: _Row, reason: str, made: Snapshot, now: float) -> None:
        """A choice is over: its last event was made at `made`, unless nobody waits for one."""
        call, timeline = row.call, row.request.timeline
        assert timeline is not None, "a served request without a timeline"
        row.stream.open_ids.discard(row.request.id)
        call.finish_reasons.append(reason)
        call.num_output += row.choice.completion_tokens
        call.num_cached = row.stream.num_cached
        segments = timeline.cut(made)
        if not row.stream.open_ids:
            call.path.taken(segments, made.at, now)
        tokens = row.request.num_prompt, row.choice.completion_tokens
        if reason in ("stop", "length"):
            self._row_seconds += _WEIGHT * (now - (call.first_token_at or now) - self._row_seconds)
        self.metrics.count_end(reason, now - row.submitted_at, *tokens, segments)

    def trouble(self) -> str | None:
        """Why this server should get no calls now, None if it should."""
        return "the server is stopping" if self._is_draining else self._loop.trouble()

    def drain(self, seconds: float) -> None:
        """Take nothing new from now on; what is not done in `seconds` fails."""
        assert self._home is not None
        self._is_draining = True
        self._home.call_later(seconds, self._fail_all, "the server is stopping, and this call was not done in time")

    def _fail_all(self, reason: str) -> None:
        for stream in {row.stream for row in self._rows.values()}:
            stream.fail(ClosedError(reason))

    @property
    def is_lost(self) -> bool:
        """No step will run any more."""
        return self._loop.is_lost

    @property
    def is_quiet(self) -> bool:
        """No choice is being made."""
        return not self._rows

    def _end_overdue(self) -> None:
        assert self._home is not None
        late = overdue(self._rows.values(), self.serve_limits, time.monotonic())
        for stream, error in late.items():
            stream.fail(error)
        self._home.call_later(LOOK_SECONDS, self._end_overdue)

    def _beat(self) -> None:
        assert self._home is not None
        for stream in {row.stream for row in self._rows.values()}:
            stream.beat()
        self._home.call_later(self._beat_seconds, self._beat)

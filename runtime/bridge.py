"""asyncio ⇄ loop thread: requests over, each step's events back in one hop (lines run per step)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ostinato.engines.errors import OstinatoError, RequestError

from .call import Call
from .choice import ChoiceStream
from .intake import Intake
from .loop import Loop
from .metrics import Metrics
from .request import STEP_FAILED, Event, Request, SamplingParams
from .stream import Stream
from .timeline import Timeline
from .tokenizer import Tokenizer

MAX_WAITING = 512  # choices beyond those that one step holds
BEAT_SECONDS = 10.0

logger = logging.getLogger(__name__)


class BusyError(OstinatoError):
    """The waiting queue is full: try again later."""


class ClosedError(OstinatoError):
    """The server is draining or its loop has ended."""


class Prompt(NamedTuple):
    """One prompt of a call and how to go on from it."""

    token_ids: list[int]
    params: SamplingParams


@dataclass(slots=True, eq=False)
class _Row:
    """A choice that is being made."""

    request: Request
    stream: Stream
    index: int
    choice: ChoiceStream
    submitted_at: float
    token_at: float | None = None


class Bridge:
    """Everything here runs on the asyncio thread, but for `emit` and `ended`, which the loop calls on its own."""

    def __init__(
        self, loop: Loop, intake: Intake, tokenizer: Tokenizer, metrics: Metrics, max_waiting: int = MAX_WAITING
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = intake.limits
        self.metrics = metrics
        self._intake = intake
        self._loop = loop
        self._max_rows = intake.limits.max_rows + max_waiting
        self._rows: dict[int, _Row] = {}
        self._home: asyncio.AbstractEventLoop | None = None
        self._is_draining = False
        self._has_ended = False
        metrics.watch(loop.scheduler)

    def start(self) -> None:
        """Start the loop's thread; its events come to the asyncio loop that runs now."""
        self._home = asyncio.get_running_loop()
        self._home.call_later(BEAT_SECONDS, self._beat)
        self._loop.start(self)

    async def close(self) -> str | None:
        """Stop the loop and release the executor; streams that are open fail. Tells why the loop failed, if it did."""
        self._is_draining = True
        trouble = self._loop.trouble()
        await asyncio.to_thread(self._loop.close)
        return trouble

    def submit(self, prompts: Sequence[Prompt], call: Call, *, salt: str = "", priority: int = 0) -> Stream:
        """Start all choices of one call; they are numbered through, prompt by prompt. `salt` is the caller's own wish.

        Raises RequestError where a prompt is not servable, BusyError on a full queue, ClosedError where nothing new is
        taken; then nothing was started.
        """
        if self._is_draining or self._has_ended:
            raise ClosedError("the server is stopping" if self._is_draining else "the server has stopped")
        requests = [
            request
            for prompt in prompts
            for request in self._intake.requests(
                prompt.token_ids, prompt.params, salt=call.caller.salt + salt, priority=priority
            )
        ]
        if len(self._rows) + len(requests) > self._max_rows:
            raise BusyError(f"{len(self._rows)} choices are running or waiting already: try again later")
        stream = Stream(sum(len(prompt.token_ids) for prompt in prompts), self._abort)
        now = time.monotonic()
        for index, request in enumerate(requests):
            request.timeline, request.tenant = Timeline(self._loop.clock), call.caller.tenant
            call.timelines.append(request.timeline)
            choice = ChoiceStream(self.tokenizer, request.tokens, request.params)
            self._rows[request.id] = _Row(request, stream, index, choice, now)
            stream.open_ids.add(request.id)
        # Only now: from here on the loop's thread owns the requests' tokens.
        for request in requests:
            self._loop.submit(request)
        return stream

    def _abort(self, request_id: int) -> None:
        if (row := self._rows.pop(request_id, None)) is not None:
            self._loop.abort(request_id)
            self._count_end(row, "abort", time.monotonic())

    def emit(self, events: list[Event]) -> None:
        """One hop a step, for all streams."""
        assert self._home is not None
        self._home.call_soon_threadsafe(self._dispatch, events)

    def ended(self) -> None:
        """The loop's last word."""
        assert self._home is not None
        self._home.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._has_ended = True
        self._fail_all("the server has stopped")

    def _dispatch(self, events: list[Event]) -> None:
        now = time.monotonic()
        for event in events:
            # A row that was aborted may have an event under way.
            if (row := self._rows.get(event.request_id)) is not None:
                try:
                    self._take(row, event, now)
                except Exception:  # a fault in one answer must not take the other answers' events along
                    logger.exception("an event could not be handed on")
                    row.stream.fail(RequestError("the answer failed inside the server", code=STEP_FAILED))

    def _take(self, row: _Row, event: Event, now: float) -> None:
        stream = row.stream
        if event.prompt_logprobs is not None:
            stream.prompt_logprobs[row.index] = event.prompt_logprobs
        if event.token_id is not None:
            self._count_token(row, now)
        delta = row.choice.push(event)
        if delta is None:
            return
        if delta.finish_reason is not None:
            self._end(row, delta.finish_reason, now)
        if delta.error is not None:
            stream.fail(delta.error)
        else:
            stream.add(row.index, delta)

    def _end(self, row: _Row, reason: str, now: float) -> None:
        del self._rows[row.request.id]
        row.stream.open_ids.discard(row.request.id)
        row.stream.num_output += row.choice.completion_tokens
        if row.request.choice == 0:
            row.stream.num_cached += row.choice.num_cached
        if row.choice.wants_abort:
            self._loop.abort(row.request.id)
        self._count_end(row, reason, now)

    def _count_token(self, row: _Row, now: float) -> None:
        self.metrics.generation_tokens.inc()
        if row.token_at is None:
            self.metrics.prompt_tokens.inc(row.request.num_prompt)
            self.metrics.first_token_seconds.observe(now - row.submitted_at)
        else:
            self.metrics.between_tokens_seconds.observe(now - row.token_at)
        row.token_at = now

    def _count_end(self, row: _Row, reason: str, now: float) -> None:
        self.metrics.finished[reason].inc()
        self.metrics.request_seconds.observe(now - row.submitted_at)

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

    def _beat(self) -> None:
        assert self._home is not None
        for stream in {row.stream for row in self._rows.values()}:
            stream.beat()
        self._home.call_later(BEAT_SECONDS, self._beat)

"""The deltas of one call on their way from the loop to its answer (lines run per step, on the asyncio thread)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ostinato.engines.errors import OstinatoError

from .call import Call
from .choice import Delta
from .request import TokenLogprob
from .serve_limits import ServeLimits

PromptLogprobs = tuple[TokenLogprob | None, ...]

_CHUNK_BYTES = 256  # about what a delta takes besides its text


def _do_nothing() -> None: ...


class Stream:
    """Deltas in order of arrival. It ends when every choice has ended, when one fails, or when it is cancelled.

    A delta that its answer can take at once, by `take`, wakes nobody; the last one always wakes the reader.
    A reader that leaves too much unread is dropped: `drop` is his answer's, which closes the connection.
    """

    def __init__(self, call: Call, abort: Callable[[int], None], limits: ServeLimits) -> None:
        self.call = call
        self.limits = limits
        self.drop: Callable[[], None] = self.cancel
        self.take: Callable[[int, Delta], bool] | None = None
        self.num_prompt = call.num_prompt  # tokens of all prompts together
        self.num_cached = 0  # of them, served from the prefix cache
        self.num_output = 0
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}  # by choice, where asked for
        self.error: OstinatoError | None = None
        self.is_cancelled = False
        self.open_ids: set[int] = set()  # requests of the choices that are being made
        self._abort = abort
        self._ready: list[tuple[int, Delta]] = []
        self._num_unread = 0  # bytes of them, about
        self._is_quiet = False
        self._waiter: asyncio.Future[None] | None = None

    async def batch(self) -> list[tuple[int, Delta]] | None:
        """(choice, delta) pairs, all that are ready; an empty list after a beat without any, None at the end."""
        if not self._ready and self.open_ids and not self.is_cancelled:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        ready, self._ready, self._num_unread = self._ready, [], 0
        return ready if (ready or self.open_ids) and not self.is_cancelled else None

    def add(self, index: int, delta: Delta) -> None:
        """Hand on a delta of choice `index`."""
        self._is_quiet = False
        # Only if the reader waits here: else what it was given before may not be out yet.
        waits = self._waiter is not None and not self._waiter.done()
        if waits and self.open_ids and self.take is not None and self.take(index, delta):
            return
        self._ready.append((index, delta))
        self._num_unread += len(delta.text) + _CHUNK_BYTES
        self._wake()
        if self._num_unread > self.limits.max_unread_bytes:
            self.drop()

    def fail(self, error: OstinatoError) -> None:
        """End with an error after the deltas that are ready."""
        self.error = error
        self._abort_open()
        self._wake()

    def cancel(self) -> None:
        """End now, since nobody reads on: rows that are left leave before the next step."""
        self.is_cancelled = True
        self._abort_open()
        self._wake()

    def close(self) -> None:
        """Nobody reads on. What it calls is let go of: in a circle it would stay until the next search for garbage."""
        self.cancel()
        self.drop, self.take, self.call.leave = _do_nothing, None, None

    def beat(self) -> None:
        """Let the reader see an empty batch if nothing came since the beat before."""
        if self._is_quiet:
            self._wake()
        self._is_quiet = True

    def _abort_open(self) -> None:
        for request_id in tuple(self.open_ids):
            self._abort(request_id)
        self.open_ids.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

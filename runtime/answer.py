"""An answer on its way out: whole or as server-sent events, ended early if its reader leaves (lines run per step)."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .choice import Delta
from .chunks import COMMENT, timings_field
from .reader import TRANSPORT, Reader
from .stream import Stream
from .wire_errors import Refusal, refusal

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_PART_BYTES = 64 * 1024


class Writer(Protocol):
    """An endpoint's shapes."""

    def opening(self) -> bytes:
        """Chunks that need no token."""
        ...

    def chunks(self, index: int, delta: Delta) -> bytes:
        """A delta of choice `index` as chunks."""
        ...

    def closing(self, stream: Stream) -> bytes:
        """What ends a stream."""
        ...

    def failing(self, refusal: Refusal) -> bytes:
        """What ends a stream that failed on its way."""
        ...

    def add(self, index: int, delta: Delta) -> None:
        """Keep a delta for `whole`."""
        ...

    def whole(self, stream: Stream) -> bytes:
        """The answer that is no stream."""
        ...


class _Answer(Response):
    """An answer made of a stream, which ends with it or when its reader leaves."""

    def __init__(self, stream: Stream, writer: Writer) -> None:
        super().__init__()
        self._stream = stream
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_watch(receive, self._stream))
        reader = Reader(self._stream, send, scope.get("state", {}).get(TRANSPORT))
        try:
            await self._answer(scope, receive, reader.send)
            await reader.flush()
        finally:
            self._stream.cancel()
            watcher.cancel()

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class StreamAnswer(_Answer):
    """Sends what is ready in one piece; headers go out before the first token."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._stream.call.path
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            await _send_part(send, self._writer.opening())
            async for batch in self._stream.batches():
                before = path.enter("format")
                parts = [self._writer.chunks(index, delta) for index, delta in batch]
                path.enter(before)
                await _send_part(send, b"".join(parts) if batch else COMMENT)
            if not self._stream.is_cancelled:
                await send({"type": "http.response.body", "body": self._ending()})
        except OSError:  # the reader left between two parts
            return

    def _ending(self) -> bytes:
        if self._stream.error is None:
            return self._writer.closing(self._stream)
        return self._writer.failing(refusal(self._stream.error))


class WholeAnswer(_Answer):
    """Waits for all choices; the status is an error's if one failed."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for batch in self._stream.batches():
            for index, delta in batch:
                self._writer.add(index, delta)
        if self._stream.error is not None:
            await refusal(self._stream.error).response()(scope, receive, send)
        elif not self._stream.is_cancelled:
            body = self._whole()
            headers = [*_JSON, (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for start in range(0, len(body), _PART_BYTES):  # between two, a slow reader is waited for
                await _send_part(send, body[start : start + _PART_BYTES])
            await send({"type": "http.response.body", "body": b""})

    def _whole(self) -> bytes:
        with self._stream.call.span("format"):
            body = self._writer.whole(self._stream)
        return body[:-1] + timings_field(self._stream) + b"}"


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _watch(receive: Receive, stream: Stream) -> None:
    """Cancel the stream when its reader leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.cancel()

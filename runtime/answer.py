"""An answer on its way out: whole or as server-sent events, ended early if its reader leaves (lines run per step)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .choice import Delta
from .chunks import COMMENT, timings_field
from .outlet import OUTLET, Outlet
from .reader import Reader
from .server_body import digest
from .stream import Stream
from .wire_errors import Refusal, refusal

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_PART_BYTES = 64 * 1024
_TOKEN_BYTES = 64  # of an answer, with logprobs


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
        stream, outlet = self._stream, scope["state"][OUTLET]
        reader = Reader(stream, send, outlet)
        stream.take = self._taker(outlet)
        outlet.watch(stream.cancel)
        try:
            await self._answer(scope, receive, reader.send, outlet)
            await reader.flush()
        finally:
            outlet.unwatch(stream.cancel)
            stream.close()

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send, outlet: Outlet) -> None: ...

    @abstractmethod
    def _taker(self, outlet: Outlet) -> Callable[[int, Delta], bool]:
        """What takes a delta at once while `_answer` waits for one, or says that it can't."""


class StreamAnswer(_Answer):
    """Sends what is ready in one piece; headers go out before the first token."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send, outlet: Outlet) -> None:
        stream = self._stream
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            if opening := self._writer.opening():
                if outlet.is_open:
                    outlet.write(opening)
                else:
                    await _send_part(send, opening)
            last = b""
            while (batch := await stream.batch()) is not None:
                with stream.call.span("format"):
                    part = b"".join([self._writer.chunks(index, delta) for index, delta in batch])
                if stream.open_ids:
                    await _send_part(send, part if batch else COMMENT)
                else:  # it goes out with the ending
                    last = part
            if not stream.is_cancelled:
                await _send_part(send, last + self._ending(), True)
        except OSError:  # the reader left between two parts
            return

    def _taker(self, outlet: Outlet) -> Callable[[int, Delta], bool]:
        chunks = self._writer.chunks

        def take(index: int, delta: Delta) -> bool:
            if not outlet.is_open:
                return False
            if part := chunks(index, delta):
                outlet.write(part)
            return True

        return take

    def _ending(self) -> bytes:
        if self._stream.error is None:
            return self._writer.closing(self._stream)
        return self._writer.failing(refusal(self._stream.error))


class WholeAnswer(_Answer):
    """Waits for all choices; the status is an error's if one failed."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send, outlet: Outlet) -> None:
        while (batch := await self._stream.batch()) is not None:
            for index, delta in batch:
                self._writer.add(index, delta)
        if self._stream.error is not None:
            await refusal(self._stream.error).response()(scope, receive, send)
        elif not self._stream.is_cancelled:
            body = await self._whole()
            headers = [*_JSON, (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for start in range(0, len(body), _PART_BYTES):  # between two, a slow reader is waited for
                part = body[start : start + _PART_BYTES]
                await _send_part(send, part, start + _PART_BYTES >= len(body))

    def _taker(self, outlet: Outlet) -> Callable[[int, Delta], bool]:
        add = self._writer.add

        def take(index: int, delta: Delta) -> bool:
            add(index, delta)
            return True

        return take

    async def _whole(self) -> bytes:
        stream = self._stream
        num_tokens = stream.num_output + sum(map(len, stream.prompt_logprobs.values()))
        with stream.call.span("format"):
            body = await digest(num_tokens * _TOKEN_BYTES, partial(self._writer.whole, stream))
        return body[:-1] + timings_field(self._stream) + b"}"


async def _send_part(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})

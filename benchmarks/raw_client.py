"""A client of event streams that costs next to nothing while it runs: it keeps what comes, and reads it afterwards.

On a machine that server and client share, what the client takes is missing in the server. So a stream is the bytes of a
connection and when they came; only `read` looks at them, and checks that the stream is whole.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

SILENT_SECONDS = 120
_EVENT = b"data: "
_split_events = re.compile(rb"\r?\n\r?\n").split  # servers of either habit are measured


@dataclass
class Reply:
    """A stream that was read. `token_times`: when each chunk with a choice came, on `time.perf_counter`'s clock.

    `error`: what was wrong with it, empty where it is whole: status 200, every event JSON, usage, [DONE] at the end.
    """

    token_times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""


class RawStream(asyncio.Protocol):
    """One request on a connection of its own, which the server closes after it. `began_at`: before it connected."""

    def __init__(self, request: bytes, began_at: float) -> None:
        self.began_at = began_at
        self.done = asyncio.get_running_loop().create_future()
        self._request = request
        self._parts: list[tuple[float, bytes]] = []
        self._fault: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parts.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fault = None if exc is None else f"{type(exc).__name__}: {exc}"
        if not self.done.done():
            self.done.set_result(None)

    def look(self) -> None:
        """Hang up if nothing came for long."""
        last = self._parts[-1][0] if self._parts else self.began_at
        if time.perf_counter() - last > SILENT_SECONDS:
            self._transport.abort()
            self._fault = f"nothing came for {SILENT_SECONDS} s"

    def read(self) -> Reply:
        """What came, once `done` is."""
        reading = _Reading()
        parser = httptools.HttpResponseParser(reading)
        for reading.now, data in self._parts:
            try:
                parser.feed_data(data)
            except httptools.HttpParserError as error:
                reading.reply.error = f"no HTTP: {error}"
                break
        if self._parts and not reading.reply.error.startswith("no HTTP") and parser.get_status_code() != 200:
            reading.reply.error = f"HTTP {parser.get_status_code()}: {bytes(reading.rest[:200])!r}"
        reply = reading.finished()
        reply.error = self._fault or reply.error
        return reply


class _Reading:
    """What httptools tells of one answer."""

    def __init__(self) -> None:
        self.now = 0.0  # when the part that is fed came
        self.rest = bytearray()  # of an event that is not whole
        self.reply = Reply()
        self._is_done = self._is_complete = self._has_usage = False

    def on_body(self, body: bytes) -> None:
        self.rest += body
        *events, rest = _split_events(self.rest)
        self.rest = bytearray(rest)
        for event in events:
            self._take(bytes(event))

    def on_message_complete(self) -> None:
        self._is_complete = True

    def _take(self, event: bytes) -> None:
        if self._is_done or not event.startswith(_EVENT):
            if self._is_done or not event.startswith(b":"):  # a comment keeps a connection alive
                self.reply.error = self.reply.error or f"out of place: {event[:200]!r}"
            return
        if event == _EVENT + b"[DONE]":
            self._is_done = True
            return
        chunk: dict[str, Any] = json.loads(event.removeprefix(_EVENT))
        if "error" in chunk:
            self.reply.error = json.dumps(chunk["error"])
        if (usage := chunk.get("usage")) is not None:
            self._has_usage = True
            self.reply.num_tokens = usage["completion_tokens"]
        if chunk.get("choices"):
            self.reply.token_times.append(self.now)

    def finished(self) -> Reply:
        reply = self.reply
        if not (self._is_complete and self._is_done and self._has_usage and not self.rest and reply.token_times):
            reply.error = reply.error or f"the stream is not whole: {len(reply.token_times)} chunks came"
        return reply


@dataclass(frozen=True)
class Address:
    """Where to ask: of an http URL without a path."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Address:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.path.strip("/"):
            raise SystemExit(f"{url} is no address: give http://HOST:PORT")
        return cls(parts.hostname, parts.port or 80)

    async def stream(self, path: str, body: dict[str, Any]) -> RawStream:
        """The answer to a POST, as it comes. Raises OSError where nobody listens."""
        raw = json.dumps(body).encode()
        head = [
            f"POST {path} HTTP/1.1",
            f"host: {self.host}:{self.port}",
            "content-type: application/json",
            f"content-length: {len(raw)}",
            "connection: close",
        ]
        request = "\r\n".join([*head, "", ""]).encode("ascii") + raw
        loop, began_at = asyncio.get_running_loop(), time.perf_counter()
        _, stream = await loop.create_connection(lambda: RawStream(request, began_at), self.host, self.port)
        return stream

"""uvicorn's HTTP protocol with bounds on heads, slow bodies and connections, which it lacks (lines run per request)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from .door import Door
from .http_metrics import OTHER
from .old_http import Unchunked
from .outlet import OUTLET, Outlet
from .wire_errors import HttpError, refusal

_GRACE_SECONDS = 5.0  # in which who reads a body says 408 itself
_Due = tuple[float, Callable[[], None]]  # seconds, and what happens after them
_MAX_TOLD_BYTES = 100  # of a field that is refused
_FRAME_BYTES = 8  # that may be sent for each byte of a body: a chunk of one byte takes 6


class BoundedHttp(HttpToolsProtocol):
    """Answers what is no HTTP, or too much of it, with an error object and hangs up.

    One timer a connection: for the head that is awaited or under way, then for the body. It is set once what has come
    is parsed, which mostly is all. Between two requests the keep-alive timer runs instead. An offer to speak another
    protocol is passed over, as HTTP allows.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.access_log = False  # its lines would repeat what callers wrote into paths, whatever handlers there are
        self._door: Door = config.app.state.door  # type: ignore[union-attr]
        self._limits = self._door.limits
        self._is_in_head = True
        self._is_in_body = False
        self._num_head_bytes = self._num_field_bytes = self._num_hosts = 0
        self._codings: list[bytes] = []
        self._num_body_bytes = self._num_frame_bytes = 0
        self._fault: HttpError | None = None
        self._answered: RequestResponseCycle | None = None  # of several requests the one whose turn it is
        self._due: _Due | None = None  # what is awaited
        self._timed: _Due | None = None  # what the timer is set to
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._leavers: set[Callable[[], None]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._due = self._limits.head_seconds, self._head_is_late
        self._set_timer()
        if len(self.connections) > self._limits.max_connections:
            self._refuse(HttpError(503, f"{self._limits.max_connections} connections are open: try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self._end_answer()
        super().connection_lost(exc)

    def _end_answer(self) -> None:
        """Nobody will get it. uvicorn tells the newest alone, and only once the connection is lost."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        for leave in tuple(self._leavers):
            leave()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data and not self.transport.is_closing():
            data = self._feed(data)
        if self._due is None and (self.cycle is None or self.cycle.response_complete):  # what came began no request
            self._due = self._limits.head_seconds, self._head_is_late
        if self._due is not self._timed:
            self._set_timer()

    def _feed(self, data: bytes) -> bytes:
        """Parse; what is left to parse after an offer of another protocol."""
        was_in_head, was_in_body, before = self._is_in_head, self._is_in_body, self._num_body_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return self._head_without_offer() + data[offer.args[0] :]
        except httptools.HttpParserError:
            self._refuse(self._fault or HttpError(400, "this is not valid HTTP/1.1"))
            return b""
        if was_in_head and self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self._limits.max_head_bytes + self._limits.max_request_line_bytes:
                self._refuse(HttpError(431, "the request's head does not end: send less"))
        if was_in_body and self._is_in_body:
            spare = len(data) - _FRAME_BYTES * (self._num_body_bytes - before)
            self._num_frame_bytes = max(0, self._num_frame_bytes + spare)
            if self._num_frame_bytes > self._limits.max_head_bytes:
                self._refuse(HttpError(400, "the body is little beside its chunks' sizes and trailers: send it plain"))
        return b""

    def _head_without_offer(self) -> bytes:
        """The head that was parsed, for a parser that will go on after it: the old one takes a body for the other
        protocol's.
        """
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % field for field in self.headers if field[0] not in (b"connection", b"upgrade")]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the one before
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes, self._num_frame_bytes = True, 0, 0
        self._num_field_bytes, self._num_hosts, self._codings = 0, 0, []
        self._due = self._limits.head_seconds, self._head_is_late
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """What comes after a body is dropped: in the head it could be taken for a key or a media type."""
        if not self._is_in_head:
            return
        name = name.lower()
        if name == b"host":
            self._num_hosts += 1
        elif name == b"transfer-encoding":
            self._codings.append(value)
        elif name == b"expect":
            self.expect_100_continue = self.expect_100_continue or value.lower() == b"100-continue"
        self._num_field_bytes += len(name) + len(value) + 4
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._check_head()
        if self.parser.should_upgrade():  # the same head comes again without that
            return
        self._is_in_head, self._is_in_body = False, True
        self._due = self._limits.body_seconds + _GRACE_SECONDS, self._body_is_late
        super().on_headers_complete()
        self.scope["state"][OUTLET] = Outlet(self.cycle, self._leavers, self._whose_turn)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] != "1.1":
            app = Unchunked(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _whose_turn(self) -> RequestResponseCycle | None:
        return self._answered

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_body = False
        self._due = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_unread()

    def _watch_unread(self) -> None:
        """See that answers are read that were written whole: until they are, even a closed connection stays. A new one
        has its own time; if nobody reads, there are only as many as the system takes.
        """
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        if size := self.transport.get_write_buffer_size():
            self._unread_timer = self.loop.call_later(self._limits.unread_seconds, self._look_at_unread, size)

    def _look_at_unread(self, size: int) -> None:
        # By then half of it could be gone. While an answer is made nothing can be told, and its Reader looks.
        if not self._leavers and self.transport.get_write_buffer_size() > size // 2:
            self.transport.abort()
        self._watch_unread()

    def _check_head(self) -> None:
        """What is raised here ends the parser's work."""
        limits = self._limits
        method, num_hosts = self.parser.get_method(), self._num_hosts
        line = len(method) + len(self.url) + len(" HTTP/1.1") + 1
        if line > limits.max_request_line_bytes:
            self._fault = HttpError(431, f"the request line exceeds {limits.max_request_line_bytes} bytes: send less")
        elif len(self.headers) > limits.max_headers:
            self._fault = HttpError(431, f"there are more than {limits.max_headers} header fields: send fewer")
        elif self._num_field_bytes > limits.max_head_bytes:
            self._fault = HttpError(431, f"the header fields exceed {limits.max_head_bytes} bytes: send less")
        elif (codings := b",".join(self._codings)).strip().lower() not in (b"", b"chunked"):  # what it wraps is no body
            told = codings[:_MAX_TOLD_BYTES].decode("latin-1")
            self._fault = HttpError(400, f"the transfer coding {told!r} is not known here: send it plain, or chunked")
        elif method == b"CONNECT":
            self._fault = HttpError(400, "this HTTP server is no proxy: call it directly")
        elif num_hosts != 1 and (num_hosts > 1 or self.parser.get_http_version() == "1.1"):
            self._fault = HttpError(400, f"an HTTP/1.1 request has one Host field, this one has {num_hosts}")
        if self._fault is not None:
            raise self._fault

    def _head_is_late(self) -> None:
        if self._num_head_bytes:
            self._refuse(HttpError(408, f"the request's head did not arrive within {self._limits.head_seconds:g} s"))
        else:
            self.transport.close()  # nobody asked anything

    def _body_is_late(self) -> None:
        self.transport.close()

    def _refuse(self, error: HttpError) -> None:
        """While an earlier request of this connection is being answered nothing can be said in between."""
        self._stop_timer()
        cycle = self.cycle
        is_free = cycle is None or cycle.response_complete or not (cycle.response_started or self.pipeline)
        if is_free:
            self._door.http.count(OTHER, OTHER, error.status)
            body = refusal(error).to_json()
            head = [
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
                *([f"retry-after: {error.retry_seconds}"] if error.status == 503 else []),
            ]
            self.transport.write("\r\n".join([*head, "", ""]).encode("ascii") + body)
        self._end_answer()
        self.transport.close()
        self._watch_unread()

    def _set_timer(self) -> None:
        """To what is due now, or to nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timed = self._due
        if self._due is not None:
            self._timer = self.loop.call_later(*self._due)

    def _stop_timer(self) -> None:
        self._due = None
        self._set_timer()

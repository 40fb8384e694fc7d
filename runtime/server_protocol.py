"""uvicorn's HTTP protocol with bounds on heads, slow bodies and connections, which it lacks (lines run per request)."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from .door import Door
from .http_metrics import OTHER
from .reader import TRANSPORT
from .wire_errors import HttpError, refusal

_GRACE_SECONDS = 5.0  # in which who reads a body says 408 itself


class BoundedHttp(HttpToolsProtocol):
    """Answers what is no HTTP, or too much of it, with an error object and hangs up.

    One timer a connection: for the head that is awaited or under way, then for the body. Between two requests the
    keep-alive timer runs instead.
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
        self._num_head_bytes = 0
        self._fault: HttpError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time(self._limits.head_seconds, self._head_is_late)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(HttpError(503, f"{self._limits.max_connections} connections are open: try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self._limits.max_head_bytes + self._limits.max_request_line_bytes:
                self._refuse(HttpError(431, "the request's head does not end: send less"))

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        self._time(self._limits.head_seconds, self._head_is_late)
        super().on_message_begin()
        self.scope["state"][TRANSPORT] = self.transport

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._time(self._limits.body_seconds + _GRACE_SECONDS, self._body_is_late)
        self._check_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def _check_head(self) -> None:
        """What is raised here comes back through the parser as `send_400_response`."""
        limits = self._limits
        line = len(self.parser.get_method()) + len(self.url) + len(" HTTP/1.1") + 1
        num_bytes = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if line > limits.max_request_line_bytes:
            self._fault = HttpError(431, f"the request line exceeds {limits.max_request_line_bytes} bytes: send less")
        elif len(self.headers) > limits.max_headers:
            self._fault = HttpError(431, f"there are more than {limits.max_headers} header fields: send fewer")
        elif num_bytes > limits.max_head_bytes:
            self._fault = HttpError(431, f"the header fields exceed {limits.max_head_bytes} bytes: send less")
        if self._fault is not None:
            raise self._fault

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._fault or HttpError(400, "this is not valid HTTP/1.1"))

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
        self.transport.close()

    def _time(self, seconds: float, late: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

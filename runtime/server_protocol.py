"""uvicorn's HTTP protocol with a bound on a request's head, which its parser lacks (lines run per request)."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 * 1024  # past the first read


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 and hangs up where a head has too many fields or does not end."""

    _is_in_head = False
    _num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("the request's head is too long")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if len(self.headers) > MAX_HEADERS:
            raise ValueError("too many header fields")  # the parser's caller makes this a 400
        super().on_headers_complete()

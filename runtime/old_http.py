"""Answers to HTTP/1.0, which knows no chunks: what has no length ends with its connection (per such request)."""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Unchunked:
    """The application for one request. uvicorn would write chunks where no length is told."""

    def __init__(self, app: Any, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle, is_told = self._cycle, True

        async def send_plain(message: Message) -> None:
            nonlocal is_told
            if message["type"] == "http.response.start":
                is_told = any(name == b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = None if is_told else False
            elif not is_told:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_plain)

"""Between the connection and a call: the time that bytes take, and the header that tells of it (per message)."""

from __future__ import annotations

from starlette.types import Message, Receive, Send

from .call import Call


class Account:
    """One call's. Its `receive` and `send` stand in for those of the connection."""

    def __init__(self, call: Call, receive: Receive, send: Send) -> None:
        self._call = call
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        """What the caller sends; once its choices are being made, somebody only listens whether he hangs up."""
        if self._call.timelines:
            return await self._receive()
        with self._call.span("read"):
            return await self._receive()

    async def send(self, message: Message) -> None:
        """What the caller gets."""
        call = self._call
        before = call.path.enter("write")
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"server-timing", self._timing())]}
        try:
            await self._send(message)
        finally:
            call.path.enter(before)

    def _timing(self) -> bytes:
        """The spans so far, in milliseconds."""
        spans = self._call.path.spans()
        return ", ".join([f"{name};dur={seconds * 1e3:.3f}" for name, seconds in spans.items()]).encode()

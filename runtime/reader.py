"""Who reads an answer: bytes go out as he takes them, and he is dropped if he does not (lines run per part)."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Send

from .outlet import Outlet
from .stream import Stream

_LOOK_SECONDS = 0.001, 0.05  # first and longest time between two looks at what is unread


class Reader:
    """One answer's."""

    def __init__(self, stream: Stream, send: Send, outlet: Outlet) -> None:
        self._stream = stream
        self._send = send
        self._outlet, self._transport = outlet, outlet.transport
        self._seconds = stream.limits.unread_seconds
        stream.drop = self.drop

    async def send(self, message: Message) -> None:
        """Send; waits while too much is unread, but not for ever."""
        if not self._transport.get_write_buffer_size():  # nothing to wait for: no need of a timer
            await self._send(message)
            return
        timer = asyncio.get_running_loop().call_later(self._seconds, self.drop)
        try:
            await self._send(message)
        finally:
            timer.cancel()

    async def flush(self) -> None:
        """Wait until the system has taken all that was sent: only then the answer is out. That can't be told any more
        once another answer follows on the connection, which then looks after its reader.
        """
        transport, outlet = self._transport, self._outlet
        if not transport.get_write_buffer_size():
            return
        with self._stream.call.span("write"):
            timer = asyncio.get_running_loop().call_later(self._seconds, self.drop)
            pause, longest = _LOOK_SECONDS
            while transport.get_write_buffer_size() and not (transport.is_closing() or outlet.is_followed):
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)
            timer.cancel()

    def drop(self) -> None:
        """He reads too slowly: what is being made for him ends, and so does the connection."""
        self._stream.call.is_slow = True
        self._stream.cancel()
        self._transport.abort()

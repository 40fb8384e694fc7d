"""The connection under an answer: parts go out without an await, and who hangs up is known (lines run per delta)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

OUTLET = "outlet"  # in the state of an ASGI scope


class Outlet:
    """One request's. `leavers` are the connection's: what to do when it is lost. So is `whose_turn`: whose answer is
    made, or was last.
    """

    def __init__(
        self,
        cycle: RequestResponseCycle,
        leavers: set[Callable[[], None]],
        whose_turn: Callable[[], RequestResponseCycle | None],
    ) -> None:
        self.transport: asyncio.Transport = cycle.transport
        self._cycle = cycle
        self._whose_turn = whose_turn
        self._flow = cycle.flow
        self._leavers = leavers

    def watch(self, leave: Callable[[], None]) -> None:
        """From now on, `leave` is called if the connection is lost, or was before."""
        if self.transport.is_closing():
            leave()
        self._leavers.add(leave)

    def unwatch(self, leave: Callable[[], None]) -> None:
        """It is not called any more."""
        self._leavers.discard(leave)

    @property
    def is_followed(self) -> bool:
        """Whether another answer's turn has come: what is unread may then be its."""
        return self._whose_turn() is not self._cycle

    def take_body(self) -> bytes | None:
        """The request's body if all of it is here, and small; it then is nowhere else."""
        if self._cycle.more_body or self._cycle.disconnected or self._flow.read_paused:
            return None
        body, self._cycle.body = self._cycle.body, bytearray()
        return bytes(body)

    @property
    def is_open(self) -> bool:
        """Whether a part of a body that has begun can go out now: its reader keeps up, and is there."""
        return not self._flow.write_paused and self._cycle.chunked_encoding is True and not self.transport.is_closing()

    def write(self, part: bytes) -> None:
        """Write a part, which is not empty, while `is_open`: what uvicorn's `send` makes of it."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

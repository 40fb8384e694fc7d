"""Between a call and its connection: the time that bytes take, and the headers that tell of the call (per message)."""

from __future__ import annotations

import re

from starlette.types import Message, Send

from .call import Call

_MAX_IGNORED = 20  # names in the header
_MAX_NAME_CHARS = 64


class Account:
    """One call's. Its `send` stands in for that of the connection."""

    def __init__(self, call: Call, send: Send) -> None:
        self._call = call
        self._send = send

    async def send(self, message: Message) -> None:
        """What the caller gets."""
        call = self._call
        before = call.path.enter("write")
        if message["type"] == "http.response.start":
            call.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *_headers(call)]}
        try:
            await self._send(message)
        finally:
            call.path.enter(before)


def _headers(call: Call) -> list[tuple[bytes, bytes]]:
    headers = [(b"x-request-id", call.id.encode("ascii")), (b"server-timing", _timing(call))]
    return [*headers, (b"x-ostinato-ignored", _ignored_names(call))] if call.ignored else headers


def _timing(call: Call) -> bytes:
    """The spans so far, in milliseconds."""
    return ", ".join([f"{name};dur={seconds * 1e3:.3f}" for name, seconds in call.path.spans().items()]).encode()


def _ignored_names(call: Call) -> bytes:
    """The fields that were left out, for a header: a caller's names, so cleaned and cut."""
    names = [_cleaned(name) for name in call.ignored[:_MAX_IGNORED]]
    more = [f"and {len(call.ignored) - _MAX_IGNORED} more"] if len(call.ignored) > _MAX_IGNORED else []
    return ", ".join([*names, *more]).encode("ascii")


def _cleaned(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name[:_MAX_NAME_CHARS])

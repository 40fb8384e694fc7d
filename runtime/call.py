"""One HTTP call: whose it is, and where its time goes before and after the loop has it (made per request)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from .timeline import Timeline


@dataclass(frozen=True)
class Caller:
    """Whom a key names. `tenant` and `salt` follow from the key on the server; a caller can't choose them."""

    tenant: str = ""
    salt: str = ""  # keeps tenants' prefixes apart


class Call:
    """`id` is always fresh: a client's own never names anything inside. `ignored`: fields that were not understood.

    `spans`: seconds by name, on the asyncio thread; what the loop did is in `timelines`, one a choice.
    """

    def __init__(self, caller: Caller) -> None:
        self.id = f"req-{uuid.uuid4().hex}"
        self.caller = caller
        self.began_at = time.monotonic()
        self.spans: dict[str, float] = {}
        self.timelines: list[Timeline] = []
        self.ignored: list[str] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What happens inside belongs to `name`."""
        began_at = time.monotonic()
        try:
            yield
        finally:
            self.spans[name] = self.spans.get(name, 0.0) + time.monotonic() - began_at


def call_of(request: Request) -> Call:
    """The call that a request is."""
    call: Call = request.state.call
    return call

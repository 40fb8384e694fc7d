"""How long a call may wait in the queue, and take in all (looked at four times a second)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ostinato.engines.errors import OstinatoError

from .call import Call
from .request import Request, Status
from .serve_limits import ServeLimits
from .stream import Stream

LOOK_SECONDS = 0.25


class QueueTimeoutError(OstinatoError):
    """No row became free in time: try again later."""


class CallTimeoutError(OstinatoError):
    """The whole call took too long."""


class Waiter(Protocol):
    """A choice that is being made."""

    @property
    def request(self) -> Request: ...
    @property
    def stream(self) -> Stream: ...
    @property
    def submitted_at(self) -> float: ...
    @property
    def call(self) -> Call: ...


def overdue(waiters: Iterable[Waiter], limits: ServeLimits, now: float) -> dict[Stream, OstinatoError]:
    """Streams to end, and why. A call of which any choice has begun is not in the queue any more."""
    queued: dict[Stream, bool] = {}
    late: dict[Stream, OstinatoError] = {}
    for waiter in waiters:
        request, stream = waiter.request, waiter.stream
        if now - waiter.call.began_at > limits.request_seconds:
            late[stream] = CallTimeoutError(
                f"the call took longer than {limits.request_seconds:g} s: ask for fewer tokens"
            )
        has_begun = request.status is not Status.WAITING or request.num_preemptions > 0 or stream.num_output > 0
        is_waiting = not has_begun and now - waiter.submitted_at > limits.wait_seconds
        queued[stream] = queued.get(stream, True) and is_waiting
    for stream, is_late in queued.items():
        if is_late:
            late.setdefault(
                stream, QueueTimeoutError(f"no turn came within {limits.wait_seconds:g} s: try again later")
            )
    return late

"""Reading and parsing a request's body, its bounds kept while it arrives (lines run per request)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive

from .call import Call, call_of
from .door import Door
from .json_depth import check_shape
from .outlet import OUTLET, Outlet
from .serve_limits import ServeLimits
from .wire import BodyT
from .wire_errors import HttpError
from .wire_parse import parse_body

_MAX_INLINE_BYTES = 32 * 1024
_MEDIA_TYPE = "application/json"

T = TypeVar("T")


async def read_body(request: Request, door: Door, kind: type[BodyT]) -> tuple[BodyT, int]:
    """The checked body and how many bytes it came in, for `digest`. Raises what `_read_bounded` and `parse_body` do; a
    RequestError too where its JSON is too deep or has too many objects.
    """
    call = call_of(request)
    with call.span("parse"):
        raw = await _read_bounded(request, door, call)
        return await digest(len(raw), partial(_parsed, kind, raw, call, door)), len(raw)


def _parsed(kind: type[BodyT], raw: bytes, call: Call, door: Door) -> BodyT:
    limits = door.limits
    check_shape(raw, limits.max_json_depth, limits.max_json_objects)
    return parse_body(kind, raw, None if door.strict_fields else call.ignored, limits.max_messages)


async def _read_bounded(request: Request, door: Door, call: Call) -> bytes:
    """The whole body. HttpError: 415 for another media type, 413 for too many bytes, 408 where they are too slow, 503
    where too much arrives at once.
    """
    limits = door.limits
    _check_media_type(call)
    declared = call.field(b"content-length") or ""
    if declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise _too_large(limits)
    outlet: Outlet = request.scope["state"][OUTLET]
    with call.span("read"):  # once for all parts, which may be a byte each
        raw = outlet.take_body()
        if raw is None:
            raw = await _read_in_time(request.receive, door)
        else:
            _check_arrived(len(raw), door.num_arriving_bytes + len(raw), limits)
    return raw


async def digest(num_bytes: int, work: Callable[[], T]) -> T:
    """Do what takes the longer the larger a body is; a large one's on another thread, so that streams go on."""
    return work() if num_bytes <= _MAX_INLINE_BYTES else await asyncio.to_thread(work)


async def _read_in_time(receive: Receive, door: Door) -> bytes:
    seconds = door.limits.body_seconds
    try:
        async with asyncio.timeout(seconds):
            return await _read(receive, door)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {seconds:g} s: send it faster") from None


async def _read(receive: Receive, door: Door) -> bytes:
    body = bytearray()  # not a list of parts, which may be a byte each
    is_whole = False
    try:
        while not is_whole:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HttpError(400, "the body ended early")  # nobody is left to read this
            part, is_whole = message["body"], not message["more_body"]
            body += part
            door.num_arriving_bytes += len(part)
            _check_arrived(len(body), door.num_arriving_bytes, door.limits)
        return bytes(body)
    finally:
        door.num_arriving_bytes -= len(body)


def _check_arrived(num_bytes: int, num_arriving: int, limits: ServeLimits) -> None:
    """Of one body, and of all that arrive."""
    if num_bytes > limits.max_body_bytes:
        raise _too_large(limits)
    if num_arriving > limits.max_arriving_bytes:
        raise HttpError(503, "too many large bodies arrive at once: try again later", code="bodies_busy")


def _check_media_type(call: Call) -> None:
    if call.field(b"content-encoding") not in (None, "identity"):
        raise HttpError(415, "compressed bodies are not supported: send it plain")
    given = call.field(b"content-type")
    if given is not None and given.partition(";")[0].strip().lower() != _MEDIA_TYPE:
        raise HttpError(415, "the content type is not application/json: set that header")


def _too_large(limits: ServeLimits) -> HttpError:
    return HttpError(413, f"the body exceeds {limits.max_body_bytes} bytes: send less", code="body_too_large")

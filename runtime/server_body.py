"""Reading a request's body with its bounds kept while it arrives (lines run per request)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from .wire_errors import HttpError

MAX_BODY_BYTES = 8 * 2**20
MAX_BODY_SECONDS = 30.0
_MAX_INLINE_BYTES = 32 * 1024

T = TypeVar("T")


async def read_body(request: Request) -> bytes:
    """The whole body. HttpError: 415 for another media type, 413 past MAX_BODY_BYTES, 408 past MAX_BODY_SECONDS."""
    _check_media_type(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            return await _read(request)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {MAX_BODY_SECONDS:.0f} s: send it faster") from None
    except ClientDisconnect:
        raise HttpError(400, "the body ended early") from None  # nobody is left to read this


async def digest(num_bytes: int, work: Callable[[], T]) -> T:
    """Do what takes the longer the larger a body is; a large one's on another thread, so that streams go on."""
    return work() if num_bytes <= _MAX_INLINE_BYTES else await asyncio.to_thread(work)


async def _read(request: Request) -> bytes:
    parts = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        parts.append(part)
    return b"".join(parts)


def _check_media_type(request: Request) -> None:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HttpError(415, "compressed bodies are not supported: send it plain")
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(415, "the content type is not application/json: set that header")


def _too_large() -> HttpError:
    return HttpError(413, f"the body exceeds {MAX_BODY_BYTES} bytes: send less", code="body_too_large")

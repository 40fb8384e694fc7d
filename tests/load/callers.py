"""Many callers of one server at once, and what each of them heard (in tests of load)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.serving import MODEL, PATIENCE_SECONDS

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_SECONDS, sock_connect=PATIENCE_SECONDS)


@dataclass
class Heard:
    """One call. Times are seconds on the monotonic clock; `error` is the error object, of a refusal or an event."""

    status: int = 0
    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    num_ends: int = 0  # reasons, errors: exactly one is right
    is_closed: bool = False  # by [DONE], or by a whole body
    retry_after: str | None = None
    sent_at: float = 0.0
    token_times: list[float] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.is_closed and self.error is None and self.num_ends == 1


OnHeard = Callable[[Heard], object]


def body(number: int, **fields: Any) -> dict[str, Any]:
    """A completion that differs from that of any other number, and is the same each time."""
    prompt = [number % 251, number // 251 % 251, 7, 7]
    return {"model": MODEL, "prompt": prompt, "seed": number, "max_tokens": 12, "ignore_eos": True} | fields


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=TIMEOUT)


async def call(
    connections: aiohttp.ClientSession, url: str, asked: dict[str, Any], on_part: OnHeard = lambda _: None
) -> Heard:
    """`on_part` is told of the headers and of each token. A connection that breaks leaves `is_closed` False."""
    heard = Heard(sent_at=time.monotonic())
    try:
        async with connections.post(f"{url}/v1/completions", json=asked) as response:
            heard.status = response.status
            heard.retry_after = response.headers.get("retry-after")
            on_part(heard)
            if response.status == 200 and asked.get("stream"):
                async for line in response.content:
                    _take_line(heard, line)
                    on_part(heard)
            else:
                _take_whole(heard, await response.json())
    except aiohttp.ClientError:
        pass
    heard.ended_at = time.monotonic()
    return heard


def _take_line(heard: Heard, line: bytes) -> None:
    if line.startswith(b"data: [DONE]"):
        heard.is_closed = True
    elif line.startswith(b"data: "):
        chunk = json.loads(line[6:])
        assert not heard.is_closed, "an event came after the last"
        if "error" in chunk:
            heard.error = chunk["error"]
            heard.num_ends += 1
        for choice in chunk.get("choices", ()):
            heard.token_times.append(time.monotonic())
            heard.text += choice["text"]
            if choice["finish_reason"] is not None:
                heard.finish = choice["finish_reason"]
                heard.num_ends += 1


def _take_whole(heard: Heard, table: dict[str, Any]) -> None:
    heard.is_closed, heard.num_ends = True, 1
    heard.token_times.append(time.monotonic())
    if "error" in table:
        heard.error = table["error"]
    else:
        (choice,) = table["choices"]
        heard.text, heard.finish = choice["text"], choice["finish_reason"]


async def call_all(url: str, asked: Iterable[dict[str, Any]]) -> list[Heard]:
    """All at once."""
    async with session() as connections:
        return await asyncio.gather(*(call(connections, url, one) for one in asked))


def answers(url: str, numbers: Iterable[int], **fields: Any) -> dict[int, str]:
    """The right texts: each asked for alone."""

    async def ask() -> dict[int, str]:
        async with session() as connections:
            heard = {number: await call(connections, url, body(number, **fields)) for number in numbers}
        assert all(one.is_whole for one in heard.values())
        return {number: one.text for number, one in heard.items()}

    return asyncio.run(ask())

"""Four times what a server can do: it does what it can, refuses the rest at once, and is then as before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import aiohttp
import numpy as np
import pytest

from tests.load.callers import Heard, answers, body, call, session
from tests.load.toy_process import Toy, ToyProcess, toy_process
from tests.scale import IS_SOAK, scaled
from tests.serving import PATIENCE_SECONDS

pytestmark = pytest.mark.timed

TOY = Toy(step_seconds=0.02, max_rows=8, max_waiting=16)  # at best 8 rows * 50 steps/s / 8 tokens = 50 calls a second
MEASURED_SECONDS, OVERLOAD_SECONDS = scaled(1, 10), scaled(3, 60)
FACTOR = 4
ASKED = body(5, max_tokens=8)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyProcess]:
    with toy_process(tmp_path_factory.mktemp("toy"), TOY) as server:
        yield server
        assert server.end() == 0


async def capacity(url: str) -> float:
    """Calls a second where a new one follows each that ends, and the queue is never empty."""
    until = time.monotonic() + MEASURED_SECONDS

    async def caller(connections: aiohttp.ClientSession) -> int:
        count = 0
        while time.monotonic() < until:
            count += (await call(connections, url, ASKED)).is_whole
        return count

    async with session() as connections:
        counts = await asyncio.gather(*(caller(connections) for _ in range(2 * TOY.max_rows)))
    return sum(counts) / MEASURED_SECONDS


async def overload(url: str, rate: float) -> list[Heard]:
    """Calls at `rate`, whatever becomes of those before."""
    began_at = time.monotonic()
    async with session() as connections:
        calls = []
        for number in range(int(rate * OVERLOAD_SECONDS)):
            await asyncio.sleep(max(0.0, began_at + number / rate - time.monotonic()))
            calls.append(asyncio.create_task(call(connections, url, ASKED | {"stream": number % 2 == 0})))
        return await asyncio.gather(*calls)


async def seconds_until_as_before(url: str, usual: float) -> float:
    """Until a lone call takes no longer than twice what it did."""
    began_at = time.monotonic()
    async with session() as connections:
        while True:
            heard = await call(connections, url, ASKED)
            assert heard.is_whole
            if heard.ended_at - heard.sent_at <= 2 * usual:
                return time.monotonic() - began_at
            assert time.monotonic() - began_at < PATIENCE_SECONDS


async def lone_call(url: str) -> float:
    async with session() as connections:
        heard = await call(connections, url, ASKED)
    return heard.ended_at - heard.sent_at


def test_four_times_what_it_can_do(server: ToyProcess) -> None:
    wanted = answers(server.url, [5], max_tokens=8)[5]
    usual = asyncio.run(lone_call(server.url))
    can_do = asyncio.run(capacity(server.url))

    heard = asyncio.run(overload(server.url, FACTOR * can_do))

    taken = [one for one in heard if one.status == 200]
    refused = [one for one in heard if one.status != 200]
    assert taken
    assert refused
    assert all(one.is_whole and one.text == wanted for one in taken), "one that was taken did not end well"
    for one in refused:
        assert one.status in (429, 503)
        assert one.error is not None
        assert one.error["code"] in ("queue_full", "not_ready", "queue_timeout"), one.error
        assert int(one.retry_after or 0) >= 1
    recovery = asyncio.run(seconds_until_as_before(server.url, usual))
    if IS_SOAK:  # where nothing else runs
        times = [one.ended_at - one.sent_at for one in refused]
        assert np.percentile(times, 99) <= 0.1, "refusals are slow"
        window = [one for one in taken if one.ended_at - heard[0].sent_at <= OVERLOAD_SECONDS]
        assert len(window) / OVERLOAD_SECONDS >= 0.9 * can_do, "work is lost under overload"
        assert recovery <= 10

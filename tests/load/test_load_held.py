"""A full server for a while: every answer right and ended once, no false alarm, nothing that grows."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from tests.load.callers import Heard, answers, body, call, session
from tests.load.toy_process import Toy, ToyProcess, toy_process
from tests.scale import IS_SOAK, scaled

pytestmark = [pytest.mark.timed, pytest.mark.timeout(1200)]

NUM_CALLERS, NUM_BODIES = 64, 24
SECONDS = scaled(2, 600)
TOY = Toy(step_seconds=0.002, max_rows=16)
PROBE_SECONDS = 0.25


async def hold(server: ToyProcess) -> tuple[list[tuple[int, Heard]], list[int], list[float]]:
    """All callers call again and again: what they heard, the state at each probe, memory over time."""
    until = time.monotonic() + SECONDS
    heard: list[tuple[int, Heard]] = []
    states: list[int] = []
    memory: list[float] = []

    async def caller(connections: aiohttp.ClientSession, first: int) -> None:
        number = first
        while time.monotonic() < until or len(heard) < 2 * NUM_CALLERS:
            number = (number + 1) % NUM_BODIES
            heard.append((number, await call(connections, server.url, body(number, stream=first % 3 > 0))))

    async def probe(connections: aiohttp.ClientSession) -> None:
        while time.monotonic() < until:
            for path in ("/health", "/health/ready"):
                async with connections.get(server.url + path) as response:
                    states.append(response.status)
            memory.append(server.resident_bytes() / 2**20)
            await asyncio.sleep(PROBE_SECONDS)

    async with session() as connections:
        await asyncio.gather(probe(connections), *(caller(connections, number) for number in range(NUM_CALLERS)))
    return heard, states, memory


def first_token(heard: list[tuple[int, Heard]], begin: float, end: float) -> float:
    """The 99th percentile of the calls that were sent in a part of the time, in seconds."""
    start = heard[0][1].sent_at
    times = [one.token_times[0] - one.sent_at for _, one in heard if begin <= (one.sent_at - start) / SECONDS < end]
    return float(np.percentile(times, 99))


def test_a_full_server_stays_as_it_is(tmp_path: Path) -> None:
    with toy_process(tmp_path, TOY) as server:
        wanted = answers(server.url, range(NUM_BODIES))
        heard, states, memory = asyncio.run(hold(server))
        assert server.end() == 0
    assert len(heard) > NUM_CALLERS
    assert all(one.is_whole for _, one in heard)
    assert all(one.text == wanted[number] for number, one in heard)
    assert set(states) == {200}
    if IS_SOAK:
        assert first_token(heard, 5 / 6, 1) <= 1.2 * first_token(heard, 1 / 6, 1 / 2)
        minutes = np.arange(len(memory)) * SECONDS / len(memory) / 60
        settled = minutes > minutes[-1] / 3
        slope = np.polyfit(minutes[settled], np.array(memory)[settled], 1)[0]
        assert slope < 1, f"memory grows by {slope:.1f} MiB a minute"

"""Callers who hang up at any moment, in numbers: nothing of them stays, and the others do not notice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import PosLM, make_limits
from tests.load.callers import Heard, answers, body, call, session
from tests.scale import IS_SOAK, scaled
from tests.serving import PATIENCE_SECONDS, VOCAB_SIZE, Running, await_true, serving

pytestmark = pytest.mark.timed

NUM_CALLS = scaled(100, 1000)
NUM_AT_ONCE = 48
GONE_WITHIN = 2.0 if IS_SOAK else PATIENCE_SECONDS
LIMITS = make_limits(max_rows=8, max_step_tokens=32, num_blocks=16)  # some are preempted


def asked(number: int) -> dict[str, Any]:
    """Prompts of one to three steps; every other answer is streamed; one in seven has more choices than one."""
    chance = random.Random(number)
    prompt = [number % 251, number // 251, *chance.choices(range(200), k=chance.randrange(60))]
    return body(number, prompt=prompt, max_tokens=chance.randrange(1, 40), stream=number % 4 < 2)


async def cut(server: Running, number: int) -> None:
    """Send the call, hear some of the answer or none, and reset the connection."""
    chance = random.Random(-number)
    raw = json.dumps(asked(number) | {"n": 3 if number % 7 == 0 else 1}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    whole = head.encode() + b"content-length: %d\r\n\r\n" % len(raw) + raw
    writer.write(whole[: chance.choice([len(whole)] * 9 + [len(whole) - 5])])  # one in ten is cut while it is sent
    try:
        async with asyncio.timeout(chance.choice([0, 0.002, 0.01, 0.05])):
            await reader.readexactly(chance.choice([1, 400, 2000, 10**6]))
    except (TimeoutError, asyncio.IncompleteReadError):
        pass
    writer.transport.abort()


async def storm(server: Running) -> dict[int, Heard]:
    """Half of the calls are cut; what the other half heard."""
    room = asyncio.Semaphore(NUM_AT_ONCE)
    heard = {}
    async with session() as connections:

        async def one(number: int) -> None:
            async with room:
                if number % 2:
                    await cut(server, number)
                else:
                    heard[number] = await call(connections, server.url, asked(number))

        await asyncio.gather(*(one(number) for number in range(NUM_CALLS)))
    return heard


def num_tasks(server: Running) -> int:
    home = server.bridge._home
    assert home is not None

    async def count() -> int:
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), home).result(PATIENCE_SECONDS)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_half_of_a_thousand_hang_up(tmp_path: Path) -> None:
    kept = range(0, NUM_CALLS, 2)
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server:
        wanted: dict[int, str] = {}
        for number in kept:
            wanted |= answers(server.url, [number], **asked(number))
        server.await_idle()
        await_true(lambda: num_tasks(server) < 10, "answers are still under way")
        tasks, files = num_tasks(server), num_files()

        heard = asyncio.run(storm(server))

        ended_at = time.monotonic()
        server.await_idle()
        assert not server.bridge._rows
        assert time.monotonic() - ended_at <= GONE_WITHIN
        assert all(heard[number].is_whole for number in kept)
        assert {number: heard[number].text for number in kept} == wanted
        await_true(lambda: num_tasks(server) <= tasks, "tasks are left")
        await_true(lambda: num_files() <= files, "connections are left open")
        assert server.loop.scheduler.num_preemptions > 0

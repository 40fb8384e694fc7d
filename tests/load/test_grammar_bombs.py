"""Grammars that explode, thrown while others stream: each is answered within its bounds, and the streams go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest

from ostinato.runtime.serve_limits import ServeLimits
from tests.grammar_bombs import BOMBS, asked, wave
from tests.load.callers import Heard, body, call, session
from tests.load.toy_process import Toy, ToyProcess, resident_bytes, toy_process
from tests.scale import IS_SOAK, only_in_a_soak

pytestmark = pytest.mark.timed

LIMITS = ServeLimits()
NUM_STREAMS, NUM_TOKENS = 16, 100
NUM_BOMBS, NUM_THROWERS = 20, 2
TOY = Toy(step_seconds=0.02, max_rows=NUM_STREAMS + NUM_THROWERS)
LETTERS = {str(ord(letter)): 100 for letter in "abcdefghijklmnopqrstuvwxyz"}  # so that each token is a delta
FIELDS: dict[str, Any] = {"stream": True, "max_tokens": NUM_TOKENS, "logit_bias": LETTERS}
MAX_SLOWDOWN = 1.2
NUM_TRIES = 5  # of the comparison, which wants a machine that does nothing else
NUM_WINDOWS = 4  # of each kind, in turns


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyProcess]:
    with toy_process(tmp_path_factory.mktemp("toy"), TOY) as server:
        yield server
        assert server.end() == 0


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(number) for path in Path(f"/proc/{pid}/task").glob("*/children") for number in path.read_text().split()
        ]
    return []


class Watch:
    """What the server's workers hold at most, each with its forks."""

    def __init__(self, server: ToyProcess) -> None:
        self.idle_bytes = self.peak_bytes = 0
        self._pid = server.process.pid

    async def look(self) -> None:
        while True:
            for worker in children(self._pid):
                for fork in children(worker):
                    with suppress(OSError):
                        self.idle_bytes = max(self.idle_bytes, resident_bytes(worker))
                        self.peak_bytes = max(self.peak_bytes, resident_bytes(fork))
            await asyncio.sleep(0.005)


class Window(NamedTuple):
    """What was heard in a part of the time; streams by number."""

    streams: list[tuple[int, Heard]]
    thrown: list[Heard]


async def throw(url: str, bombs: Iterator[dict[str, Any]]) -> list[Heard]:
    """As many at once as there are workers, until there are none left."""
    async with session() as connections:

        async def thrower() -> list[Heard]:
            return [await call(connections, url, body(1, max_tokens=4, **bomb)) for bomb in bombs]

        return [one for heard in await asyncio.gather(*(thrower() for _ in range(NUM_THROWERS))) for one in heard]


async def stream_until(url: str, is_over: asyncio.Event) -> list[tuple[int, Heard]]:
    """Streams that follow each other, by number."""

    async def follow(connections: aiohttp.ClientSession, number: int) -> list[tuple[int, Heard]]:
        heard: list[tuple[int, Heard]] = []
        while not heard or not is_over.is_set():
            heard.append((number, await call(connections, url, body(number, **FIELDS))))
        return heard

    async with session() as connections:
        heard = await asyncio.gather(*(follow(connections, number) for number in range(NUM_STREAMS)))
    return [one for each in heard for one in each]


async def window(server: ToyProcess, bombs: list[dict[str, Any]], seconds: float) -> Window:
    """What streams heard, and who threw, for so long or until the last bomb is answered."""
    is_over = asyncio.Event()
    streams = asyncio.create_task(stream_until(server.url, is_over))
    await asyncio.sleep(0.2)
    until = time.monotonic() + seconds
    thrown = await throw(server.url, iter(bombs))
    await asyncio.sleep(max(0.0, until - time.monotonic()))
    is_over.set()
    return Window(await streams, thrown)


def check_answered(heard: list[Heard]) -> float:
    """Each is a refusal that says why, if only that the machine is busy, or an answer that ended well; the seconds of
    the slowest.
    """
    for one in heard:
        if one.status == 400:
            assert one.error is not None
            assert one.error["param"] == "structured_outputs"
            assert str(one.error["code"]).startswith(("unsupported_", "grammar_too_costly"))
        elif one.status == 429:
            assert one.error is not None
            assert one.error["code"] == "grammars_busy"
        else:
            assert one.is_whole
    slowest = max(one.ended_at - one.sent_at for one in heard)
    refused = sum(one.status in (400, 429) for one in heard)
    print(f"{refused} of {len(heard)} bombs refused, the slowest answer after {slowest:.2f} s")
    return slowest


def test_streams_beside_every_bomb_say_what_they_say_alone(server: ToyProcess) -> None:
    quiet = asyncio.run(window(server, [], 0.0)).streams
    wanted = {number: one.text for number, one in quiet}
    assert len(set(wanted.values())) == NUM_STREAMS
    bombs = [dict(asked(spec)) for spec in BOMBS.values() if len(spec.source) < 2**19]
    before = server.resident_bytes()

    async def watched() -> tuple[Window, Watch]:
        watch = Watch(server)
        looking = asyncio.create_task(watch.look())
        heard = await window(server, bombs, 0.0)
        looking.cancel()
        return heard, watch

    (streams, thrown), watch = asyncio.run(watched())
    assert len(thrown) == len(bombs)
    slowest = check_answered(thrown)
    assert not IS_SOAK or slowest <= LIMITS.compile_seconds
    assert all(one.is_whole for _, one in streams)
    assert all(one.text == wanted[number] for number, one in streams)
    print(f"a worker holds {watch.idle_bytes / 2**20:.0f} MiB, a trial {watch.peak_bytes / 2**20:.0f} MiB at most")
    assert 0 < watch.peak_bytes <= watch.idle_bytes + LIMITS.compile_bytes
    assert server.resident_bytes() - before <= LIMITS.grammar_cache_bytes


def test_the_first_bombs_of_a_server_find_their_workers_started(tmp_path: Path) -> None:
    with toy_process(tmp_path, Toy(warms=True)) as server:
        pid = server.process.pid
        workers = children(pid)
        assert len(workers) == NUM_THROWERS  # once it is ready
        bombs = [dict(asked(spec)) for spec in wave(0, NUM_THROWERS)]
        check_answered(asyncio.run(throw(server.url, iter(bombs))))
        assert children(pid) == workers
        assert server.end() == 0


def between(streams: list[tuple[int, Heard]]) -> list[float]:
    return [gap for _, one in streams for gap in np.diff(one.token_times).tolist()]


@only_in_a_soak
def test_streams_beside_bombs_are_as_fast_as_without(server: ToyProcess) -> None:
    numbers = count(step=NUM_BOMBS)
    found = []
    for _ in range(NUM_TRIES):
        gaps: dict[bool, list[float]] = {True: [], False: []}
        slowest = 0.0
        for turn in range(2 * NUM_WINDOWS):
            has_bombs = turn % 2 == 1
            bombs = [dict(asked(spec)) for spec in wave(next(numbers), NUM_BOMBS)] if has_bombs else []
            streams, thrown = asyncio.run(window(server, bombs, 8.0))
            assert len(thrown) == len(bombs)
            gaps[has_bombs] += between(streams)
            slowest = max(slowest, check_answered(thrown) if has_bombs else 0.0)
        quiet, bombed = (float(np.quantile(gaps[has_bombs], 0.99)) for has_bombs in (False, True))
        sizes = f"of {len(gaps[False])} and {len(gaps[True])}"
        print(f"p99 between tokens {sizes}: {quiet * 1e3:.1f} ms quiet, {bombed * 1e3:.1f} ms beside bombs")
        found.append((bombed / quiet, slowest))
        if bombed / quiet <= MAX_SLOWDOWN and slowest <= LIMITS.compile_seconds:
            return
    raise AssertionError(f"bombs slow streams down, or are answered too late: {found}")

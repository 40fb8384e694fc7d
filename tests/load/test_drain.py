"""The end of a process under load: nothing is lost that was promised, and everybody is told."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.load.callers import Heard, answers, body, call, call_all, session
from tests.load.toy_process import Toy, ToyProcess, toy_process
from tests.scale import IS_SOAK, scaled
from tests.serving import PATIENCE_SECONDS

pytestmark = pytest.mark.timed

NUM_STREAMS, NUM_QUEUED, NUM_TOKENS = 20, 10, 24
TOY = Toy(step_seconds=0.1, max_rows=NUM_STREAMS)  # a drain of seconds, so that a late caller is not too late
NOT_READY_SECONDS = 0.2 if IS_SOAK else PATIENCE_SECONDS  # on a machine that does other things, too, less is luck


async def end_under_load(server: ToyProcess) -> tuple[list[Heard], float, Heard]:
    """SIGTERM while all streams run and the queue is full: what they heard, when it was not ready, a late caller."""
    num_running, num_queued = 0, 0
    all_are_there = asyncio.Event()

    def note(heard: Heard) -> None:
        nonlocal num_running, num_queued
        num_running += len(heard.token_times) == 1
        num_queued += not heard.token_times  # headers go out before the first token
        if num_running >= NUM_STREAMS and num_queued >= NUM_STREAMS + NUM_QUEUED:
            all_are_there.set()

    async with session() as connections:
        streams = []
        for number in range(NUM_STREAMS + NUM_QUEUED):
            asked = body(number, stream=True, max_tokens=NUM_TOKENS)
            streams.append(asyncio.create_task(call(connections, server.url, asked, note)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await all_are_there.wait()
        began_at = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        while True:
            async with connections.get(f"{server.url}/health/ready") as response:
                if response.status == 503:
                    break
            assert time.monotonic() - began_at < PATIENCE_SECONDS
        not_ready = time.monotonic() - began_at
        await asyncio.sleep(0.3)  # longer than a server takes to close its port, were it to
        (late,) = await call_all(server.url, [body(99)])
        return await asyncio.gather(*streams), not_ready, late


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    with toy_process(tmp_path_factory.mktemp("wanted"), Toy()) as server:
        return answers(server.url, range(NUM_STREAMS + NUM_QUEUED), max_tokens=NUM_TOKENS)


@pytest.mark.parametrize("repeat", range(scaled(2, 20)))
def test_every_stream_that_was_taken_is_whole(tmp_path: Path, wanted: dict[int, str], repeat: int) -> None:
    with toy_process(tmp_path, TOY) as server:
        heard, not_ready, late = asyncio.run(end_under_load(server))
        assert server.process.wait(PATIENCE_SECONDS) == 0
    assert [one.is_whole for one in heard] == [True] * len(heard)
    assert [one.text for one in heard] == list(wanted.values())
    assert not_ready <= NOT_READY_SECONDS
    assert late.status == 503
    assert late.error is not None
    assert late.error["code"] == "not_ready"
    assert int(late.retry_after or 0) >= 1


def test_what_a_short_drain_cuts_ends_with_an_error_event(tmp_path: Path, wanted: dict[int, str]) -> None:
    toy = Toy(step_seconds=0.25, max_rows=NUM_STREAMS, drain_seconds=1.0)  # 6 s a stream
    with toy_process(tmp_path, toy) as server:
        heard, _, _ = asyncio.run(end_under_load(server))
        assert server.process.wait(PATIENCE_SECONDS) == 0
    for one, text in zip(heard, wanted.values(), strict=True):
        assert one.is_closed
        assert one.num_ends == 1
        assert one.error is not None
        assert one.error["code"] == "not_ready"
        assert text.startswith(one.text.rstrip("\N{REPLACEMENT CHARACTER}"))

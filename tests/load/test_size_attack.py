"""Large and slow senders of every kind: each is refused in time, at little cost, and nobody else notices."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.http_calls import complete
from tests.load.toy_process import Toy, ToyProcess, toy_process
from tests.raw_http import connect, exchange, post, read_reply, send
from tests.scale import IS_SOAK, scaled

pytestmark = pytest.mark.timed

TOY = Toy(body_seconds=scaled(6, 30))  # in which a large body must have come
NUM_SLOW = scaled(25, 500)
NUM_PARTS = scaled(160, 3200)  # of 64 KiB, at full size 200 MB
PAUSE_SECONDS = scaled(1, 10) / 10  # between a slow sender's bytes
MAX_REFUSAL_SECONDS = 1.0
LATE_SECONDS = 1.0 if IS_SOAK else 30.0  # past which a slow sender must be gone
MAX_HEALTH_SECONDS = 0.1
MAX_GROWN_BYTES = 64 * 2**20
PART = b"x" * 2**16
CHUNKED = post("/v1/completions", b"").replace(b"content-length: 0", b"transfer-encoding: chunked")


def large() -> Iterator[tuple[int, list[bytes]]]:
    """The status that is right, and what is sent."""
    chunk = b"%x\r\n%b\r\n" % (len(PART), PART)
    yield 413, [post("/v1/completions", b"", length=NUM_PARTS * len(PART)), *[PART] * NUM_PARTS]
    yield 413, [CHUNKED, *[chunk] * NUM_PARTS]
    yield 431, [b"GET /health HTTP/1.1\r\n", b"".join(b"x-%d: y\r\n" % number for number in range(50_000))]
    yield 431, [b"GET /health HTTP/1.1\r\nx: ", *[PART] * 64]
    yield 431, [b"GET /" + PART * 16]
    for opening in (b"[", b'{"a":'):
        yield 400, [post("/v1/completions", opening * 10_000)]
        yield 400, [post("/v1/completions", opening * 1_000_000)]


@contextmanager
def slow_senders(server: ToyProcess) -> Iterator[list[float]]:
    """Sockets that send a byte now and then; the seconds until each was told that it is too late."""
    connections = [connect(server.url) for _ in range(NUM_SLOW)]
    is_over = threading.Event()
    began_at = time.monotonic()
    for connection in connections:
        send(connection, post("/v1/completions", b"{", length=10_000))

    def trickle() -> None:
        while not is_over.wait(PAUSE_SECONDS):
            for connection in connections:
                send(connection, b" ")

    thread = threading.Thread(target=trickle)
    thread.start()
    seconds: list[float] = []
    try:
        yield seconds
        for connection in connections:
            reply = read_reply(connection)
            assert reply is not None
            assert reply.status == 408
            seconds.append(time.monotonic() - began_at)
    finally:
        is_over.set()
        thread.join()
        for connection in connections:
            connection.close()


@contextmanager
def watched(server: ToyProcess) -> Iterator[list[float]]:
    """Seconds that /health took, again and again."""
    is_over = threading.Event()
    seconds: list[float] = []

    def watch() -> None:
        with server.client() as client:
            while not is_over.wait(0.02):
                began_at = time.monotonic()
                assert client.get("/health").status_code == 200
                seconds.append(time.monotonic() - began_at)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seconds
    finally:
        is_over.set()
        thread.join()
        assert seconds, "health was not asked for, or did not answer"


def test_large_and_slow_senders_cost_little_and_nobody_notices(tmp_path: Path) -> None:
    with toy_process(tmp_path, TOY) as server, server.client() as client:
        wanted = complete(client, seed=1, max_tokens=20).json()["choices"]
        for status, parts in large():  # what is loaded once is there
            reply = exchange(server.url, *parts[:200])
            assert reply is not None
            assert reply.status == status
        before = server.resident_bytes()
        with watched(server) as health, slow_senders(server) as told:
            peak = before
            for status, parts in large():
                began_at = time.monotonic()
                reply = exchange(server.url, *parts)
                seconds = time.monotonic() - began_at
                assert reply is not None
                assert reply.status == status
                reply.error()
                print(f"{status} after {seconds:.2f} s")
                assert not IS_SOAK or seconds <= MAX_REFUSAL_SECONDS
                assert complete(client, seed=1, max_tokens=20).json()["choices"] == wanted
                peak = max(peak, server.resident_bytes())
        peak = max(peak, server.resident_bytes())
        print(f"health: median {statistics.median(health) * 1e3:.1f} ms, max {max(health) * 1e3:.1f} ms")
        print(f"memory grew by {(peak - before) / 2**20:.1f} MiB; slow senders were told within {max(told):.1f} s")
        assert statistics.median(health) <= MAX_HEALTH_SECONDS
        assert not IS_SOAK or max(health) <= MAX_HEALTH_SECONDS
        assert max(told) <= TOY.body_seconds + LATE_SECONDS
        assert peak - before <= MAX_GROWN_BYTES
        assert complete(client, seed=1, max_tokens=20).json()["choices"] == wanted
        assert server.end() == 0

"""Who reads slowly but steadily keeps his connection, whatever he asked before; who does not read loses it."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ostinato.runtime.serve_limits import ServeLimits
from tests.fakes import PosLM, make_limits
from tests.raw_http import connect_narrowly, post, send
from tests.serving import ANY_PORTS, MODEL, VOCAB_SIZE, Running, await_true, serving

UNREAD_SECONDS = 2.0
PAUSE_SECONDS, READ_BYTES = 0.01, 8 * 1024  # so that each answer takes a third of that at most
PAGE = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
STREAM = post(
    "/v1/completions",
    json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 400, "ignore_eos": True, "logprobs": 5, "stream": True})
    .encode(),
)  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = make_limits(max_context=1024, num_blocks=100)
    config = replace(ANY_PORTS, limits=ServeLimits(unread_seconds=UNREAD_SECONDS))
    with serving(tmp_path_factory.mktemp("toy"), limits, PosLM(limits, VOCAB_SIZE), config=config) as server:
        server.server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what the system would hold
        yield server


def read_slowly(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(READ_BYTES):
            data += part
            time.sleep(PAUSE_SECONDS)
    return data


@pytest.mark.parametrize(
    "requests",
    [[PAGE] * 28, [PAGE, *[STREAM] * 8], [STREAM] * 8, [STREAM, *[PAGE] * 22]],
    ids=["pages", "page-streams", "streams", "stream-pages"],
)
def test_an_answer_behind_another_is_read_to_its_end(running: Running, requests: list[bytes]) -> None:
    *others, last = requests
    with connect_narrowly(running.url) as connection:
        send(connection, *others, last.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
        began_at = time.monotonic()
        data = read_slowly(connection)
    assert data.count(b"HTTP/1.1 200 OK") == len(requests)
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if last is STREAM else b"}")
    assert time.monotonic() - began_at > 1.5 * UNREAD_SECONDS
    assert not any(record.is_slow for record in running.bridge.ledger.recent.last())


@pytest.mark.parametrize("pause", [0.08, 0.15, 0.3])
def test_who_breaks_off_and_does_not_read_holds_no_connection(running: Running, pause: float) -> None:
    """What he sent last is no HTTP, and comes while his answer is made."""
    with connect_narrowly(running.url) as connection:
        send(connection, STREAM)
        await_true(lambda: bool(running.server.server_state.connections), "he was not let in")
        time.sleep(pause)
        send(connection, b"\0")
        await_true(lambda: not running.server.server_state.connections, "he holds a connection")
        data = read_slowly(connection)
    assert len(data) < 16 * 1024  # what the system held
    running.await_idle()

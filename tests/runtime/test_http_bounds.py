"""What HTTP itself could be misused for: heads, bodies, connections and time, each at its bound and past it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.runtime.serve_limits import ServeLimits
from tests.fakes import PosLM
from tests.http_calls import LIMITS, complete
from tests.raw_http import Reply, connect, exchange, is_closed, post, read_reply, send
from tests.serving import ANY_PORTS, PATIENCE_SECONDS, VOCAB_SIZE, Running, await_true, serving

QUICK = ServeLimits(head_seconds=1.5, body_seconds=1.5, max_body_bytes=4096, max_connections=40)


def head(*lines: str, path: str = "/health") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode("latin-1")


def body_of(size: int) -> bytes:
    """A request of exactly so many bytes."""
    frame = b'{"model":"toy","prompt":"x","max_tokens":1,"user":"%s"}'
    return frame % (b"u" * (size - len(frame) + 2))


def status_of(url: str, *parts: bytes) -> int:
    reply = exchange(url, *parts)
    assert reply is not None
    if reply.status >= 400:
        reply.error()
    return reply.status


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with small bounds."""
    config = replace(ANY_PORTS, limits=QUICK)
    with serving(tmp_path_factory.mktemp("toy"), LIMITS, PosLM(LIMITS, VOCAB_SIZE), config=config) as server:
        yield server


@pytest.mark.parametrize(("extra", "status"), [(0, 200), (1, 431), (10_000, 431)])
def test_header_fields_are_counted(running: Running, extra: int, status: int) -> None:
    names = [f"x-{number}: y" for number in range(99 + extra)]
    assert status_of(running.url, head("host: 127.0.0.1", *names)) == status


@pytest.mark.parametrize(("extra", "status"), [(0, 200), (1, 431), (100_000, 431)])
def test_header_bytes_are_counted(running: Running, extra: int, status: int) -> None:
    fields = ["host: 127.0.0.1", "x: "]
    rest = 16 * 1024 - sum(len(field) + 2 for field in fields)
    assert status_of(running.url, head(fields[0], fields[1] + "y" * (rest + extra))) == status


@pytest.mark.parametrize(("extra", "status"), [(0, 200), (1, 431), (5000, 431), (100_000, 431)])
def test_the_request_line_is_bounded(running: Running, extra: int, status: int) -> None:
    rest = 8 * 1024 - len("GET /health? HTTP/1.1")
    assert status_of(running.url, head("host: 127.0.0.1", path="/health?" + "q" * (rest + extra))) == status


def test_a_head_without_an_end_is_cut_off(running: Running) -> None:
    for parts in ([b"GET /health HTTP/1.1\r\nx: ", *[b"y" * 2**16] * 64], [b"GET /" + b"y" * 2**20]):
        assert status_of(running.url, *parts) == 431
    lines = [b"x-%d: y\r\n" % number for number in range(50_000)]
    assert status_of(running.url, b"GET /health HTTP/1.1\r\n", b"".join(lines)) == 431


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n", b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_http_gets_an_error_object(running: Running, data: bytes) -> None:
    with connect(running.url) as connection:
        send(connection, data)
        reply = read_reply(connection)
        assert reply is not None
        assert reply.status in (400, 415)
        assert "HTTP" in reply.error()["message"] or reply.status == 415
        assert is_closed(connection)


def test_bodies_are_counted_while_they_are_read(strict: Running) -> None:
    for size, status in ((4096, 200), (4097, 413)):
        body = body_of(size)
        assert status_of(strict.url, post("/v1/completions", body)) == status
        start = post("/v1/completions", b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:100], body[100:])]
        assert status_of(strict.url, start, *parts, b"0\r\n\r\n") == status
    declared = exchange(strict.url, post("/v1/completions", b"", length=10**12))  # none of it was sent
    assert declared is not None
    assert (declared.status, declared.is_closed) == (413, True)


def test_json_is_as_deep_as_allowed(strict: Running) -> None:
    for depth, complaint in ((63, "metadata"), (64, "nested deeper than 64")):
        deep = b"[" * depth + b"]" * depth
        reply = exchange(strict.url, post("/v1/completions", b'{"model":"toy","prompt":"x","metadata":%s}' % deep))
        assert reply is not None
        assert reply.status == 400
        assert complaint in reply.error()["message"]


@pytest.mark.parametrize(("extra", "code"), [(0, "invalid_value"), (1, "invalid_json")])
def test_json_has_as_many_objects_as_allowed(running: Running, extra: int, code: str) -> None:
    """Below the bound the number of messages is told."""
    messages = b",".join([b'{"role":"user","content":"{"}'] * (32 * 1024 - 1 + extra))
    reply = exchange(running.url, post("/v1/chat/completions", b'{"model":"toy","messages":[%b]}' % messages))
    assert reply is not None
    assert (reply.status, reply.error()["code"]) == (400, code)


def test_a_head_that_comes_too_slowly_is_timed_out(strict: Running) -> None:
    with connect(strict.url) as silent, connect(strict.url) as slow:
        send(slow, b"GET /health HT")
        reply = read_reply(slow)
        assert reply is not None
        assert reply.status == 408
        assert "1.5 s" in reply.error()["message"]
        assert is_closed(slow)
        assert read_reply(silent) is None


def test_a_connection_that_is_kept_alive_may_be_idle_between_requests(strict: Running) -> None:
    with connect(strict.url) as connection:
        for idle_seconds in (2 * QUICK.head_seconds, 0.01):
            send(connection, head("host: 127.0.0.1"))
            reply = read_reply(connection)
            assert reply is not None
            assert reply.status == 200
            connection.settimeout(idle_seconds)
            with pytest.raises(TimeoutError):  # it is still open
                connection.recv(1)
            connection.settimeout(PATIENCE_SECONDS)


def test_a_body_that_comes_too_slowly_is_timed_out(strict: Running) -> None:
    paths = ("/v1/completions", "/v1/chat/completions", "/tokenize")
    with ThreadPoolExecutor(len(paths)) as pool:
        asked = [pool.submit(exchange, strict.url, post(path, b'{"model"', length=1000)) for path in paths]
    for reply in (one.result() for one in asked):
        assert reply is not None
        assert (reply.status, reply.is_closed) == (408, True)
        assert "1.5 s" in reply.error()["message"]


def test_bodies_on_their_way_may_take_so_much_together(tmp_path: Path) -> None:
    config = replace(ANY_PORTS, limits=ServeLimits(max_body_bytes=2000, max_arriving_bytes=3000))
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE), config=config) as server, server.client() as client:
        with connect(server.url) as first, connect(server.url) as second, connect(server.url) as third:
            for connection in (first, second):
                send(connection, post("/v1/completions", b" " * 1400, length=1500))
            await_true(lambda: server.door.num_arriving_bytes == 2800, "the bodies did not come")
            send(third, post("/v1/completions", b" " * 300, length=400))
            reply = read_reply(third)
            assert reply is not None
            assert (reply.status, reply.error()["code"], "retry-after" in reply.headers) == (503, "bodies_busy", True)
            assert 'ostinato:admission_rejections_total{reason="bodies_busy"} 1.0' in server.metrics()
            assert complete(client, max_tokens=1).status_code == 200  # there is room for small ones
            second.close()
            await_true(lambda: server.door.num_arriving_bytes == 1400, "a body that ended early counts on")
            assert complete(client, max_tokens=1, user="u" * 1400).status_code == 200
            send(first, b" " * 100)
            ended = read_reply(first)
            assert ended is not None
            assert ended.status == 400
        await_true(lambda: server.door.num_arriving_bytes == 0, "bytes are counted that are gone")


def test_connections_past_the_bound_are_told_to_come_back(strict: Running) -> None:
    def asked() -> Reply | None:
        return exchange(strict.url, head("host: 127.0.0.1"))

    connections = [connect(strict.url) for _ in range(QUICK.max_connections)]
    replies = []
    for connection in connections:
        send(connection, head("host: 127.0.0.1"))
        replies.append(read_reply(connection))
    assert all(reply is not None and reply.status == 200 for reply in replies)
    refused = asked()
    assert refused is not None
    assert (refused.status, refused.headers["retry-after"], refused.is_closed) == (503, "1", True)
    assert "connections are open" in refused.error()["message"]
    with strict.metrics_client() as client:
        assert client.get("/health").status_code == 200  # a port of its own
    for connection in connections:
        connection.close()
    await_true(lambda: (reply := asked()) is not None and reply.status == 200, "the places were not given back")

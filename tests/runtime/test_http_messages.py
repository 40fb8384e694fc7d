"""Messages that HTTP allows and few clients send: offers of other protocols, trailers, HTTP/1.0, stray line ends."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ostinato.runtime.serve_limits import ServeLimits
from tests.fakes import PosLM
from tests.http_calls import LIMITS
from tests.raw_http import connect, connect_narrowly, exchange, is_closed, post, read_reply, send
from tests.serving import ANY_PORTS, MODEL, VOCAB_SIZE, Running, await_true, serving

HEAD_SECONDS, UNREAD_SECONDS = 2.0, 1.0
BODY = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 3, "temperature": 0}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
CHUNKED = "transfer-encoding: chunked"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = replace(ANY_PORTS, limits=ServeLimits(head_seconds=HEAD_SECONDS, unread_seconds=UNREAD_SECONDS))
    with serving(tmp_path_factory.mktemp("toy"), LIMITS, PosLM(LIMITS, VOCAB_SIZE), config=config) as server:
        yield server


def chunked(*fields: str, body: bytes = BODY, trailers: bytes = b"") -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: 127.0.0.1", CHUNKED, *fields, "", ""]
    return "\r\n".join(lines).encode() + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)


def read_all(url: str, data: bytes) -> bytes:
    with connect(url) as connection:
        send(connection, data)
        parts = []
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def text_of(body: bytes) -> str:
    text: str = json.loads(body)["choices"][0]["text"]
    return text


@pytest.mark.parametrize("offer", ["h2c", "websocket", "TLS/1.3"])
@pytest.mark.parametrize("form", ["length", "chunks", "parts"])
def test_an_offer_of_another_protocol_is_passed_over(running: Running, offer: str, form: str) -> None:
    fields = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {offer}", "HTTP2-Settings: AAMAAABkAAQ")
    data = chunked(*fields) if form == "chunks" else post("/v1/completions", BODY, *fields)
    cut = len(data) - 20 if form == "parts" else len(data)
    plain = exchange(running.url, post("/v1/completions", BODY))
    with connect(running.url) as connection:
        for _ in range(2):  # the connection goes on
            send(connection, data[:cut])
            if form == "parts":
                time.sleep(0.05)
                send(connection, data[cut:])
            reply = read_reply(connection)
            assert reply is not None
            assert plain is not None
            assert (reply.status, text_of(reply.body)) == (200, text_of(plain.body))


def test_offers_in_a_row_are_answered_each(running: Running) -> None:
    offer = HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
    last = HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: upgrade, close\r\nupgrade: h2c\r\n\r\n")
    assert read_all(running.url, offer * 1500 + last).count(b"HTTP/1.1 200 OK") == 1501


def test_fields_after_a_body_are_no_part_of_the_head(running: Running) -> None:
    trailers = b"content-type: text/plain\r\nx-request-id: mine\r\nauthorization: Bearer x\r\n"
    reply = exchange(running.url, chunked(trailers=trailers))
    assert reply is not None
    assert reply.status == 200


@pytest.mark.parametrize("flood", [b"x-name: value\r\n", b"v" * 15, b";" + b"e" * 14])
def test_what_surrounds_a_body_is_bounded(running: Running, flood: bytes) -> None:
    """Trailers, one trailer without an end, one chunk's extension without an end."""
    end = b"1" if flood.startswith(b";") else b"0\r\nx: " if flood == b"v" * 15 else b"0\r\n"
    start = chunked(body=BODY).removesuffix(b"0\r\n\r\n") + end
    reply = exchange(running.url, start, *[flood * 4000] * 20)
    assert reply is None or reply.status == 400  # None: it hung up while we still sent


def test_a_body_of_one_byte_chunks_is_no_flood(running: Running) -> None:
    body = BODY[:-1] + b" " * 30_000 + b"}"
    parts = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    reply = exchange(running.url, chunked(body=b" ").removesuffix(b"0\r\n\r\n"), parts, b"0\r\n\r\n")
    assert reply is not None
    assert reply.status == 200


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", [], 400), ("1.1", ["127.0.0.1"], 200), ("1.1", ["127.0.0.1"] * 2, 400), ("1.0", [], 200)],
)
def test_a_request_has_one_host(running: Running, version: str, hosts: list[str], status: int) -> None:
    lines = [f"GET /health HTTP/{version}", *(f"host: {host}" for host in hosts), "", ""]
    reply = exchange(running.url, "\r\n".join(lines).encode())
    assert reply is not None
    assert reply.status == status


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_to_http_1_0_has_no_chunks(running: Running, stream: bool) -> None:
    body = json.dumps(json.loads(BODY) | {"stream": stream}).encode()
    answer = read_all(running.url, post("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head
    assert rest.startswith(b"data: ") == stream
    if stream:
        assert rest.endswith(b"\n\ndata: [DONE]\n\n")
        assert all(line == b"" or line.startswith(b"data: ") for line in rest.split(b"\n"))
    else:
        assert f"content-length: {len(rest)}".encode() in head


def test_a_lost_connection_ends_the_answer_whose_turn_it_is(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    """While another request waits behind it."""
    body = json.dumps(json.loads(BODY) | {"max_tokens": 100, "ignore_eos": True}).encode()
    with connect(running.url) as connection:
        send(connection, post("/v1/completions", body) + HEALTH)
    running.await_idle()
    assert exchange(running.url, HEALTH) is not None
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_a_request_before_what_is_no_http_leaves_no_trace_in_the_log(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes under with the connection, before or after its answer began."""
    body = json.dumps(json.loads(BODY) | {"max_tokens": 100, "ignore_eos": True, "stream": True}).encode()
    for pause in (0.0, 0.02):
        with connect(running.url) as connection:
            for part in (post("/v1/completions", body), b"\0") if pause else (post("/v1/completions", body) + b"\0",):
                send(connection, part)
                time.sleep(pause)
            assert is_closed(connection)
    running.await_idle()
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_line_ends_between_requests_hold_no_connection(running: Running) -> None:
    with connect(running.url) as connection:
        send(connection, HEALTH)
        assert read_reply(connection) is not None
        send(connection, b"\r\n")
        assert is_closed(connection)  # the test's own patience is shorter than that of keep-alive
    with connect(running.url) as connection:
        send(connection, b"\r\n\r\n" + HEALTH)
        reply = read_reply(connection)
        assert reply is not None
        assert reply.status == 200


@pytest.mark.parametrize("coding", ["chunked", "Chunked ", "gzip, chunked", "x, Chunked"])
def test_a_body_is_plain_or_chunked_and_nothing_else(running: Running, coding: str) -> None:
    reply = exchange(running.url, chunked().replace(CHUNKED.encode(), f"transfer-encoding: {coding}".encode()))
    assert reply is not None
    assert reply.status == (400 if "," in coding else 200)
    if "," in coding:
        assert f"the transfer coding '{coding}' is not known here" in reply.error()["message"]
        assert reply.is_closed


def test_answers_that_nobody_reads_hold_no_connection(running: Running) -> None:
    """The first fill what the system takes, the others wait for it."""
    ask = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    num_asked, num_bytes = 200, 0
    with connect_narrowly(running.url) as connection:
        send(connection, ask * num_asked)
        await_true(lambda: bool(running.server.server_state.connections), "he was not let in")
        await_true(lambda: not running.server.server_state.connections, "he holds a connection")
        connection.settimeout(5)  # what the system still holds may come slowly through so small a window, or not at all
        with contextlib.suppress(ConnectionError, TimeoutError):
            while part := connection.recv(2**16):
                num_bytes += len(part)
    whole = exchange(running.url, ask)
    assert whole is not None
    assert num_bytes < num_asked * len(whole.body)

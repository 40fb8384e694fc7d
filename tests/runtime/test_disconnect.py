"""Readers who leave: their rows are gone after the step that runs, in every phase, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import PosLM, make_limits
from tests.serving import MODEL, PATIENCE_SECONDS, VOCAB_SIZE, GatedLM, Running, await_true, serving

Leave = Callable[[socket.socket], None]


def close(connection: socket.socket) -> None:
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def send(server: Running, path: str = "/v1/completions", **fields: Any) -> socket.socket:
    """Send a call on a connection of its own and return at once."""
    body = json.dumps({"model": MODEL, "ignore_eos": True, "max_tokens": 50} | fields).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), PATIENCE_SECONDS)
    fields_of_head = f"host: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    head = f"POST {path} HTTP/1.1\r\n{fields_of_head}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def step(gated: GatedLM, num_steps: int) -> None:
    """Let steps end, each once the one after it has begun."""
    for _ in range(num_steps):
        gated.permit()
        gated.await_step()


@pytest.mark.parametrize("leave", [close, reset, half_close])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 9])  # of 4 steps of prefill, then decoding
def test_the_step_that_runs_is_the_last(tmp_path: Path, leave: Leave, stream: bool, num_steps: int) -> None:
    limits = make_limits(max_step_tokens=16)
    gated = GatedLM(PosLM(limits, VOCAB_SIZE))
    with serving(tmp_path, limits, gated) as server:
        connection = send(server, prompt=[7] * 60, stream=stream, n=2)
        gated.await_step()
        step(gated, num_steps)
        leave(connection)
        await_true(lambda: not server.bridge._rows, "the server did not notice")
        gated.permit()
        server.await_idle()
        assert len(gated.batches) == num_steps + 1
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_waiting_call_leaves_the_line(tmp_path: Path, stream: bool) -> None:
    limits = make_limits(max_rows=1)
    gated = GatedLM(PosLM(limits, VOCAB_SIZE))
    with serving(tmp_path, limits, gated) as server, ThreadPoolExecutor(1) as pool:
        options = {"model": MODEL, "prompt": "a", "max_tokens": 5, "ignore_eos": True, "seed": 1}
        other = pool.submit(httpx.post, server.url + "/v1/completions", json=options, timeout=PATIENCE_SECONDS)
        gated.await_step()
        connection = send(server, prompt="b", stream=stream)
        await_true(lambda: len(server.bridge._rows) == 2, "the call did not arrive")
        step(gated, 1)
        assert server.loop.scheduler.num_waiting == 1
        close(connection)
        await_true(lambda: len(server.bridge._rows) == 1, "the server did not notice")
        gated.permit(10)
        assert other.result().json()["usage"]["completion_tokens"] == 5
        server.await_idle()
        assert len(gated.batches) == 5


def test_chat_readers_leave_too(tmp_path: Path) -> None:
    limits = make_limits()
    gated = GatedLM(PosLM(limits, VOCAB_SIZE))
    with serving(tmp_path, limits, gated) as server:
        for stream in (True, False):
            before = len(gated.batches)
            messages = [{"role": "user", "content": "x"}]
            connection = send(server, "/v1/chat/completions", messages=messages, stream=stream)
            gated.await_step()
            close(connection)
            await_true(lambda: not server.bridge._rows, "the server did not notice")
            gated.permit()
            server.await_idle()
            assert len(gated.batches) == before + 1


def test_a_call_that_is_cut_off_while_it_is_sent_starts_nothing(tmp_path: Path) -> None:
    limits = make_limits()
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server, server.client() as client:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 500\r\n\r\n{")
        assert client.get("/health").status_code == 200
        assert not server.bridge._rows


def test_leaving_readers_in_a_crowd_leave_no_trace_and_the_others_are_right(tmp_path: Path) -> None:
    limits = make_limits(max_rows=6, num_blocks=40)
    chance = random.Random(11)
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server, server.client() as client:

        def ask(number: int) -> str:
            options = {"model": MODEL, "prompt": [number] * 20, "seed": number, "max_tokens": 30, "ignore_eos": True}
            text: str = client.post("/v1/completions", json=options).json()["choices"][0]["text"]
            return text

        alone = [ask(number) for number in range(12)]
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, number) for number in range(12)]
            for number in range(60):
                connection = send(server, prompt=[number] * 40, stream=bool(number % 2), max_tokens=80)
                if chance.random() < 0.5:
                    connection.settimeout(0.02)
                    with contextlib.suppress(TimeoutError):
                        connection.recv(100)
                chance.choice([close, reset])(connection)
            assert [answer.result() for answer in answers] == alone
        await_true(lambda: not server.bridge._rows, "rows are left")
        server.await_idle()
        ends = [
            float(line.rpartition(" ")[2])
            for line in server.metrics().splitlines()
            if line.startswith("ostinato:request_success_total")
        ]
        assert 24 <= sum(ends) <= 84  # each call ended once; one that was cut before it was read never began

"""Deltas that go out at once and deltas that wait for their reader: one order, and an end when he leaves."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import httpx

from ostinato.runtime.call import Call, Caller
from ostinato.runtime.choice import Delta
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.stream import Stream
from tests.fakes import PosLM, make_limits
from tests.http_calls import complete
from tests.serving import PATIENCE_SECONDS, VOCAB_SIZE, await_true, serving

OPTIONS = {"model": "toy", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
BUFFER_BYTES = 32768


def test_a_delta_goes_out_at_once_only_if_nothing_is_on_its_way() -> None:
    taken: list[str] = []
    read: list[list[str]] = []

    def take(_: int, delta: Delta) -> bool:
        taken.append(delta.text)
        return True

    async def run() -> None:
        stream = Stream(Call(Caller()), lambda _: None, ServeLimits())
        stream.open_ids.add(1)
        stream.take = take
        may_go_on = asyncio.Event()

        async def reader() -> None:
            while (batch := await stream.batch()) is not None:
                read.append([delta.text for _, delta in batch])
                await may_go_on.wait()

        def add(text: str) -> None:
            stream.add(0, Delta(text, (), ()))

        add("a")  # nobody reads yet
        task = asyncio.create_task(reader())
        await asyncio.sleep(0)
        add("b")  # the reader has "a" in his hands
        may_go_on.set()
        add("c")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        add("d")  # he waits
        add("e")
        stream.open_ids.clear()
        add("f")  # the last one is his
        await task

    asyncio.run(run())
    assert read == [["a"], ["b", "c"], ["f"]]
    assert taken == ["d", "e"]


def test_a_reader_who_is_behind_now_and_then_misses_nothing(tmp_path: Path) -> None:
    limits = make_limits(max_context=1024, num_blocks=100)
    options = OPTIONS | {"logprobs": 5}
    small = httpx.HTTPTransport(verify=False, socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)])
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server:
        with server.client() as client:
            whole = complete(client, **options).json()["choices"][0]
        server.server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        with (
            httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS, transport=small) as client,
            client.stream("POST", "/v1/completions", json=options | {"stream": True}) as response,
        ):
            lines = response.iter_lines()
            first = next(lines)
            server.await_idle()  # far ahead of what was read
            events = [line.removeprefix("data: ") for line in (first, *lines) if line]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    assert tokens == whole["logprobs"]["tokens"]


def test_who_leaves_with_another_request_behind_ends_the_one_that_runs(tmp_path: Path) -> None:
    """The HTTP server tells only the newest request of a lost connection."""
    limits = make_limits(max_context=8192, num_blocks=600)
    body = json.dumps(OPTIONS | {"max_tokens": 8000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server:
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port or 80), PATIENCE_SECONDS) as connection:
            connection.sendall((head + body) * 2)
            await_true(lambda: server.loop.scheduler.num_running == 1, "it does not run")
        await_true(lambda: bool(server.bridge.ledger.recent.last()), "nobody noticed")
        record = server.bridge.ledger.recent.last()[0]
        assert record.finish_reasons == ("abort",)
        assert record.num_output < 8000
        server.await_idle()

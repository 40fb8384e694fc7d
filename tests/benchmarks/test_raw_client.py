"""The client of the load benchmarks says of a stream that it is whole only if it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import uvloop
from raw_client import Address, Reply

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"data: {"}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def ask(parts: Sequence[bytes], *, aborts: bool = False) -> Reply:
    """The reading of an answer that comes in these parts."""

    async def run() -> Reply:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"connection: close" in head
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.002)
            if aborts:
                writer.transport.abort()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        stream = await Address.of(f"http://127.0.0.1:{port}/").stream("/v1/completions", {"prompt": "x"})
        await stream.done
        server.close()
        return stream.read()

    reply: Reply = uvloop.run(run())  # as the benchmarks do
    return reply


@pytest.mark.parametrize("blank", [b"\n\n", b"\r\n\r\n"])
def test_a_whole_stream_is_counted_however_its_bytes_come(blank: bytes) -> None:
    events = (TOKEN, b": keep-alive\n\n", TOKEN + TOKEN, USAGE + DONE)
    whole = HEAD + b"".join(chunk(event.replace(b"\n\n", blank)) for event in events) + END
    for size in (1, 7, 64, len(whole)):
        reply = ask([whole[at : at + size] for at in range(0, len(whole), size)])
        assert (reply.error, reply.num_tokens, len(reply.token_times)) == ("", 3, 3)
        assert reply.token_times == sorted(reply.token_times)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (chunk(TOKEN) + chunk(USAGE + DONE), "not whole"),  # the end of the chunks is missing
        (chunk(TOKEN) + chunk(USAGE) + END, "not whole"),
        (chunk(TOKEN) + chunk(DONE) + END, "not whole"),
        (chunk(USAGE + DONE) + END, "not whole"),
        (chunk(TOKEN + USAGE + DONE + TOKEN) + END, "out of place"),
        (chunk(TOKEN + b"event: x\n\n" + USAGE + DONE) + END, "out of place"),
        (chunk(TOKEN + b'data: {"error":{"message":"the step failed"}}\n\n' + DONE) + END, "the step failed"),
        (b"zz\r\n", "no HTTP"),
    ],
)
def test_what_is_missing_or_wrong_is_told(body: bytes, said: str) -> None:
    assert said in ask([HEAD + body]).error


def test_a_refusal_and_a_lost_connection_are_told() -> None:
    refusal = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 7\r\nconnection: close\r\n\r\nno room"
    assert ask([refusal]).error == "HTTP 429: b'no room'"
    assert ask([]).error.startswith("the stream is not whole")
    assert ask([HEAD + chunk(TOKEN)], aborts=True).error


def test_only_plain_addresses_are_taken() -> None:
    for url in ("https://127.0.0.1", "127.0.0.1:8000", "http://127.0.0.1:8000/v1"):
        with pytest.raises(SystemExit, match="give http"):
            Address.of(url)

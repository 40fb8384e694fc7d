"""Every call's wall time is the sum of its spans: 500 mixed calls over a real connection, and what is told of them."""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from ostinato.runtime.call import CallRecord
from ostinato.runtime.critical_path import SPANS
from tests.fakes import PosLM, make_limits
from tests.http_calls import chat, complete, payloads
from tests.raw_http import connect, post, read_reply, send
from tests.serving import ANY_PORTS, PATIENCE_SECONDS, VOCAB_SIZE, Running, await_true, serving

LIMITS = make_limits(max_rows=4, max_step_tokens=32, max_context=128, num_blocks=12)
NUM_CALLS = 500
NUM_THREADS = 6
Ask = Callable[[httpx.Client, random.Random], httpx.Response]


def prompt(chance: random.Random, size: int) -> list[int]:
    return [chance.randrange(200) for _ in range(size)]


def whole(client: httpx.Client, chance: random.Random) -> httpx.Response:
    return complete(client, prompt="hello", max_tokens=chance.randint(1, 12), ignore_eos=True)


def streamed(client: httpx.Client, chance: random.Random) -> httpx.Response:
    return chat(client, "hello", max_tokens=chance.randint(1, 12), stream=True, ignore_eos=True)


def several(client: httpx.Client, chance: random.Random) -> httpx.Response:
    return complete(client, prompt="hi", n=chance.randint(2, 4), max_tokens=6, ignore_eos=True, stream=True)


def chunked(client: httpx.Client, chance: random.Random) -> httpx.Response:
    return complete(client, prompt=prompt(chance, 80), max_tokens=3, ignore_eos=True)


def shared(client: httpx.Client, chance: random.Random) -> httpx.Response:
    return complete(client, prompt=[7] * 60, max_tokens=4, ignore_eos=True)


def growing(client: httpx.Client, chance: random.Random) -> httpx.Response:
    """Few of them fill the pool."""
    return complete(client, prompt=prompt(chance, 30), max_tokens=80, ignore_eos=True)


def refused(client: httpx.Client, chance: random.Random) -> httpx.Response:
    return complete(client, temperature=-1) if chance.random() < 0.5 else complete(client, prompt=[1] * 500)


def aborted(client: httpx.Client, chance: random.Random) -> httpx.Response:
    options = {"model": "toy", "prompt": prompt(chance, 20), "max_tokens": 90, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=options) as response:
        chunks = response.iter_raw()
        for _ in range(chance.randint(0, 3)):
            next(chunks)
    return response


KINDS: list[tuple[Ask, int]] = [
    (whole, 110), (streamed, 110), (several, 60), (chunked, 60), (shared, 60), (growing, 40), (refused, 30),
    (aborted, 30),
]  # fmt: skip


def ask_all(server: Running) -> list[tuple[Ask, httpx.Response]]:
    kinds = [kind for kind, count in KINDS for _ in range(count)]
    assert len(kinds) == NUM_CALLS
    random.Random(5).shuffle(kinds)

    def ask(numbered: tuple[int, Ask]) -> tuple[Ask, httpx.Response]:
        number, kind = numbered
        return kind, kind(client, random.Random(number))

    with server.client() as client, ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(ask, enumerate(kinds)))


def check_record(record: CallRecord) -> None:
    """The sum rule, with a wall time that is not made of the spans."""
    total = sum(record.spans.values())
    assert abs(total - record.seconds) <= 1e-3 + 0.01 * record.seconds, (record.spans, record.seconds)
    assert set(record.spans) <= set(SPANS)
    assert min(record.spans.values()) >= 0
    assert record.pieces[0].began_at == record.began_at
    assert all(piece.ended_at == after.began_at for piece, after in pairwise(record.pieces))
    for piece in record.pieces:
        assert sum(piece.spans.values()) == pytest.approx(piece.ended_at - piece.began_at, abs=1e-6)


def test_the_spans_of_500_mixed_calls_add_up_to_their_wall_time(tmp_path: Path) -> None:
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server:
        answers = ask_all(server)
        server.await_idle()
        recent = server.bridge.ledger.recent
        await_true(lambda: len(recent.last()) == NUM_CALLS, "calls are missing")
        records = {kind: list[CallRecord]() for kind, _ in KINDS}
        for kind, response in answers:
            record = recent.find(response.headers["x-request-id"])
            assert record is not None
            records[kind].append(record)
    everything = [record for kept in records.values() for record in kept]
    for record in everything:
        check_record(record)
    check_kinds(records)
    totals = Counter[str]()
    for record in everything:
        totals.update(record.spans)
    assert totals["other"] + totals["idle"] < 0.2 * totals.total(), totals


def check_kinds(records: dict[Ask, list[CallRecord]]) -> None:
    """Each kind is there for something, and its records show it."""
    served = [kind for kind in records if kind is not refused]
    for kind in served:
        for record in records[kind]:
            assert record.status == 200
            stages = {piece.name for piece in record.pieces}
            assert stages & {"queue", "handoff"}
            assert kind is aborted or {"queue", "prefill", "decode"} <= stages
    for record in records[refused]:
        assert record.status == 400
        assert not {name for name in record.spans if name.startswith(("queue", "prefill", "decode", "handoff"))}
    assert all(record.num_choices > 1 for record in records[several])
    assert all(set(record.finish_reasons) == {"length"} for record in records[growing])
    assert sum("abort" in record.finish_reasons for record in records[aborted]) > len(records[aborted]) // 2
    assert any(record.num_cached for record in records[shared])
    assert any(record.num_preemptions for kept in records.values() for record in kept)
    assert any(record.spans.get("queue_slots") for kept in records.values() for record in kept)


def test_a_caller_gets_the_spans_so_far_in_a_header_and_all_when_it_asks(tmp_path: Path) -> None:
    limits = make_limits()
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server, server.client() as client:
        answer = complete(client, max_tokens=5, ignore_eos=True, timings=True)
        timings = answer.json()["timings"]
        header = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
        assert set(header) <= set(SPANS)
        assert {"read", "parse", "prefill_execute", "decode_execute", "host"} <= set(header)
        assert float(header["decode_execute"]) == timings["spans_ms"]["decode_execute"]
        total = timings["total_ms"]
        assert sum(timings["spans_ms"].values()) == pytest.approx(total, abs=1 + 0.01 * total)
        assert 0 < timings["ttft_ms"] <= timings["total_ms"]
        assert timings["tokens_per_second"] > 0

        stream = chat(client, max_tokens=5, ignore_eos=True, stream=True, timings=True)
        assert "decode_execute" not in stream.headers["server-timing"]
        *chunks, last = payloads(stream)
        assert last["choices"] == []
        assert {"prefill_execute", "decode_execute"} <= set(last["timings"]["spans_ms"])
        assert not any("timings" in chunk for chunk in chunks)
        assert "timings" not in complete(client, max_tokens=1).json()
        assert complete(client, timings="yes").status_code == 400


def test_a_body_that_comes_byte_by_byte_is_read_in_one_piece(tmp_path: Path) -> None:
    limits = make_limits()
    head, _, sent = post("/v1/completions", b'{"model": "toy", "prompt": "a", "max_tokens": 1}').partition(b"\r\n\r\n")
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server, connect(server.url) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in (head + b"\r\n\r\n", *(bytes([byte]) for byte in sent)):
            send(connection, part)
            time.sleep(0.001)
        assert (reply := read_reply(connection)) is not None
        assert reply.status == 200
        server.await_idle()
        (record,) = server.bridge.ledger.recent.last()
    check_record(record)
    assert [piece.name for piece in record.pieces].count("read") == 1


def reading_little(server: Running) -> httpx.Client:
    """A client whose system takes next to nothing before it reads."""
    transport = httpx.HTTPTransport(verify=False, socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    return httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS, transport=transport)


def test_a_slow_reader_is_dropped_and_nobody_else(tmp_path: Path) -> None:
    """He leaves more unread than is allowed: his row ends, and his connection."""
    limits = make_limits(max_context=4096, num_blocks=600, max_rows=2)
    bounds = replace(ANY_PORTS.limits, max_unread_bytes=16 * 1024)
    options = {"model": "toy", "prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True, "logprobs": 5}
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE), config=replace(ANY_PORTS, limits=bounds)) as server:
        server.server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what the system would hold
        with reading_little(server) as client, client.stream("POST", "/v1/completions", json=options) as response:
            assert response.status_code == 200
            await_true(lambda: bool(server.bridge.ledger.recent.last()), "the reader was not dropped")
            record = server.bridge.ledger.recent.last()[0]
            assert record.finish_reasons == ("abort",)
            assert record.num_output < 4000
            with pytest.raises(httpx.TransportError):
                response.read()
        server.await_idle()
        assert "ostinato:slow_readers_total 1.0" in server.metrics()
        with server.client() as client:
            assert complete(client, max_tokens=2).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_who_does_not_read_at_all_is_dropped_after_a_while(tmp_path: Path, stream: bool) -> None:
    limits = make_limits(max_context=1024, num_blocks=100)
    bounds = replace(ANY_PORTS.limits, unread_seconds=0.5)
    options = {"model": "toy", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "logprobs": 5, "n": 2}
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE), config=replace(ANY_PORTS, limits=bounds)) as server:
        server.server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with (
            reading_little(server) as client,
            client.stream("POST", "/v1/completions", json=options | {"stream": stream}) as response,
        ):
            await_true(lambda: bool(server.bridge.ledger.recent.last()), "the reader was not dropped")
            record = server.bridge.ledger.recent.last()[0]
            assert record.is_slow
            assert record.seconds > 0.4
            assert record.spans["write"] > (0.0 if stream else 0.4)  # a stream's rows still run for a part of it
            with pytest.raises(httpx.TransportError):
                response.read()
        server.await_idle()
        assert "ostinato:slow_readers_total 1.0" in server.metrics()

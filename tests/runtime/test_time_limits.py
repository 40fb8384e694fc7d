"""How long calls may wait and last, what is refused before it is read, and what a hint to come back says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.tokenizer import Tokenizer
from tests.fakes import PosLM, make_limits
from tests.http_calls import CHAT_FRAME, LIMITS, chat, complete, error_of, payloads
from tests.raw_http import connect, post, read_reply, send
from tests.serving import ANY_PORTS, MODEL, VOCAB_SIZE, GatedLM, TapeLM, await_true, serving, toy_tokenizer
from tests.tokenizers import byte_level

TWO_ROWS = make_limits(max_rows=2)


@pytest.mark.parametrize("call", [complete, chat])
def test_who_gets_no_turn_in_time_is_told_so(tmp_path: Path, call: Callable[..., httpx.Response]) -> None:
    gated = GatedLM(TapeLM(b"0123456789", 0 if call is complete else CHAT_FRAME))
    config = replace(ANY_PORTS, limits=ServeLimits(wait_seconds=2.0))
    with (
        serving(tmp_path, TWO_ROWS, gated, config=config) as server,
        server.client() as client,
        ThreadPoolExecutor(4) as pool,
    ):
        running = [pool.submit(call, client, temperature=0, stream=stream, max_tokens=12) for stream in (True, False)]
        gated.await_step()
        await_true(lambda: server.loop.scheduler.num_running == 2 or len(server.bridge._rows) == 2, "no rows")
        gated.permit(1)
        gated.await_step()
        waiting = [pool.submit(call, client, n=n, stream=stream) for n, stream in ((1, False), (2, True))]
        refused, cut = (future.result() for future in waiting)
        assert error_of(refused, 503)["code"] == "queue_timeout"
        assert int(refused.headers["retry-after"]) > 0
        error = payloads(cut)[-1]["error"]
        assert (error["code"], "2 s" in error["message"]) == ("queue_timeout", True)
        gated.permit(100)
        stream, whole = (future.result() for future in running)
        assert [payloads(stream)[-1]["choices"][0]["finish_reason"], whole.json()["choices"][0]["finish_reason"]] == [
            "stop", "stop",
        ]  # fmt: skip
        server.await_idle()


def test_a_call_of_which_a_choice_runs_is_not_in_the_queue(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"01", 0))
    config = replace(ANY_PORTS, limits=ServeLimits(wait_seconds=1.5))
    with (
        serving(tmp_path, TWO_ROWS, gated, config=config) as server,
        server.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(complete, client, n=5, temperature=0)
        gated.await_step()
        deadline = time.monotonic() + 4.0
        await_true(lambda: time.monotonic() > deadline, "the clock stands still")
        assert not call.done()
        gated.permit(100)
        assert [choice["text"] for choice in call.result().json()["choices"]] == ["01"] * 5


def test_a_call_lasts_no_longer_than_allowed_and_its_rows_come_free(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"0123456789" * 9, 0))
    config = replace(ANY_PORTS, limits=ServeLimits(request_seconds=2.0))
    with (
        serving(tmp_path, LIMITS, gated, config=config) as server,
        server.client() as client,
        ThreadPoolExecutor(2) as pool,
    ):
        calls = [pool.submit(complete, client, temperature=0, max_tokens=90, stream=stream) for stream in (False, True)]
        gated.permit(3)
        refused, cut = (future.result() for future in calls)
        error = error_of(refused, 408)
        assert (error["code"], "2 s" in error["message"]) == ("call_timeout", True)
        *chunks, last = payloads(cut)
        assert last["error"]["code"] == "call_timeout"
        assert "0123456789".startswith("".join(chunk["choices"][0]["text"] for chunk in chunks))
        gated.permit(100)
        server.await_idle()
        assert complete(client, temperature=0, max_tokens=2).json()["choices"][0]["text"] == "01"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_full_queue_is_refused_before_the_body_is_read(tmp_path: Path, path: str) -> None:
    gated = GatedLM(PosLM(TWO_ROWS, VOCAB_SIZE))
    with (
        serving(tmp_path, TWO_ROWS, gated, 0) as server,
        server.client() as client,
        ThreadPoolExecutor(1) as pool,
        connect(server.url) as connection,
    ):
        first = pool.submit(complete, client, n=2, max_tokens=2, ignore_eos=True)
        gated.await_step()
        send(connection, post(path, b"{", length=8 * 2**20))
        reply = read_reply(connection)
        assert reply is not None
        assert (reply.status, reply.error()["code"]) == (429, "queue_full")
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        gated.permit(100)
        assert first.result().status_code == 200


def test_the_hint_follows_from_how_long_calls_take(tmp_path: Path) -> None:
    with serving(tmp_path, TWO_ROWS, GatedLM(PosLM(TWO_ROWS, VOCAB_SIZE)), 6) as server, server.client() as client:
        rows = server.bridge._rows
        hints = []
        for seconds, num_rows in ((0.1, 8), (4.0, 8), (4.0, 7), (1000.0, 8)):
            server.bridge._row_seconds = seconds
            rows.update(dict.fromkeys(range(10_000, 10_000 + num_rows), None))  # type: ignore[arg-type]
            hints.append(complete(client, n=8 if num_rows < 8 else 1).headers["retry-after"])
            rows.clear()
        assert hints == ["1", "16", "14", "60"]


def test_a_text_that_can_not_fit_is_refused_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, LIMITS, TapeLM(b"ab", 0)) as server, server.client() as client:
        longest = max(len(raw) for raw in server.bridge.tokenizer.table.every.values())  # type: ignore[union-attr]
        bound = LIMITS.max_context * longest
        assert complete(client, prompt="y" * 100, max_tokens=1).status_code == 200
        monkeypatch.setattr(server.bridge.tokenizer, "_vocabulary", None)  # it can't be asked any more
        for call, text in ((complete, "prompt"), (chat, "content")):
            error = error_of(call(client, **{text: "y" * (bound + 1)}), 400)
            assert error["code"] == "context_length_exceeded"
        error_of(client.post("/v1/responses", json={"model": MODEL, "input": "y" * (bound + 1)}), 400)


@pytest.mark.parametrize("text", ["y", "é", "\N{OK HAND SIGN}", "<eot>", " ", "a\u0301", "<sys>x"])
def test_no_text_is_refused_that_fits(tmp_path: Path, text: str) -> None:
    tokenizer: Tokenizer = toy_tokenizer(tmp_path)
    for repeats in (1, 7, 40):
        ids = tokenizer.encode(text * repeats)
        assert tokenizer.encode(text * repeats, max_tokens=len(ids)) == ids
    with pytest.raises(RequestError, match="shorten it"):
        tokenizer.encode(text * 1000, max_tokens=3)


def test_a_normalizer_may_shorten_a_text(tmp_path: Path) -> None:
    byte_level(tmp_path)
    path = tmp_path / "tokenizer.json"
    table: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps(table | {"normalizer": {"type": "NFC"}}))
    tokenizer = Tokenizer(tmp_path)
    jamo = "\u1112\u1161\u11ab" * 30  # three of these compose to one syllable
    ids = tokenizer.encode(jamo)
    assert len(ids) * 3 == len(jamo.encode())
    assert tokenizer.encode(jamo, max_tokens=len(ids)) == ids

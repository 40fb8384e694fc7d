"""Steps and choices that fail, and streams that are silent: what the caller sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.engines.errors import DeviceError
from tests.fakes import ScriptedLM
from tests.http_calls import CHAT_FRAME, LIMITS, chat, complete, error_of, payloads
from tests.serving import MODEL, VOCAB_SIZE, FaultyLM, GatedLM, TapeLM, serving


@pytest.mark.parametrize("call", [complete, chat])
def test_a_failing_step_is_an_error_object_and_the_next_call_is_right(tmp_path: Path, call: Any) -> None:
    faulty = FaultyLM(TapeLM(b"hello", 0 if call is complete else CHAT_FRAME), DeviceError("the device refused"))
    with serving(tmp_path, LIMITS, faulty) as server, server.client() as client:
        for _ in range(3):
            faulty.is_bad = True
            error = error_of(call(client, temperature=0), 500)
            assert (error["message"], error["type"]) == ("the device refused", "server_error")
            *chunks, last = payloads(call(client, temperature=0, stream=True, n=2))
            assert last["error"]["message"] == "the device refused"
            assert all("error" not in chunk for chunk in chunks)
        assert "steps failed" in error_of(client.get("/health/ready"), 503)["message"]
        assert client.get("/health").status_code == 200
        faulty.is_bad = False
        choice = call(client, temperature=0).json()["choices"][0]
        assert (choice["text"] if call is complete else choice["message"]["content"]) == "hello"
        assert client.get("/health/ready").status_code == 200
        server.await_idle()


def test_a_choice_that_can_not_go_on_is_the_callers_error(tmp_path: Path) -> None:
    only_stop = ScriptedLM([[0.0 if token == 4 else -np.inf for token in range(VOCAB_SIZE)]])
    masked = {"min_tokens": 5, "stop_token_ids": [4]}
    with serving(tmp_path, LIMITS, only_stop) as server, server.client() as client:
        assert error_of(complete(client, **masked), 400)["code"] == "no_legal_token"
        assert payloads(complete(client, stream=True, **masked))[-1]["error"]["code"] == "no_legal_token"
        server.await_idle()


def test_logits_that_are_no_numbers_are_the_servers_error(tmp_path: Path) -> None:
    broken = ScriptedLM([[float("nan")] * VOCAB_SIZE])
    with serving(tmp_path, LIMITS, broken) as server, server.client() as client:
        assert error_of(complete(client), 500)["code"] == "backend_failure"
        assert payloads(complete(client, stream=True))[-1]["error"]["code"] == "backend_failure"
        server.await_idle()


def test_a_silent_stream_gets_comments(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"ab", 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client:
        options = {"model": MODEL, "prompt": "x", "temperature": 0, "max_tokens": 2, "stream": True}
        with client.stream("POST", "/v1/completions", json=options) as response:
            assert response.status_code == 200  # headers are there before the first token
            gated.await_step()
            lines = response.iter_lines()
            home = server.bridge._home
            assert home is not None
            for _ in range(2):
                home.call_soon_threadsafe(server.bridge._beat)
            assert next(lines) == ": keep-alive"
            gated.permit(10)
            texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
            assert "".join(texts) == "ab"

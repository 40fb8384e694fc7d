"""Text on its way to a client: line ends, cut characters, stop strings."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.http_calls import CHAT_FRAME, LIMITS, chat, complete, payloads
from tests.serving import MODEL, GatedLM, TapeLM, serving


def test_lines_of_every_kind_survive_line_based_clients(tmp_path: Path) -> None:
    text = "a\u2028b\u0085\u2029\x0b\x1c\r\n\ndata: x\x00é\x7f"
    with serving(tmp_path, LIMITS, TapeLM(text.encode(), 0)) as server, server.client() as client:
        options = {"model": MODEL, "prompt": "x", "temperature": 0, "max_tokens": 100, "stream": True}
        raw = client.post("/v1/completions", json=options)
        assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert raw.headers["cache-control"] == "no-cache"
        assert raw.headers["x-accel-buffering"] == "no"
        assert "".join(chunk["choices"][0]["text"] for chunk in payloads(raw)) == text
        with client.stream("POST", "/v1/completions", json=options) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        assert "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines) == text


@pytest.mark.parametrize("call", [complete, chat])
def test_an_answer_cut_inside_a_character_is_one_mark_and_its_bytes(tmp_path: Path, call: Any) -> None:
    tape = TapeLM("€".encode(), 0 if call is complete else CHAT_FRAME)
    with serving(tmp_path, LIMITS, tape) as server, server.client() as client:
        for logprobs in (None, 1) if call is complete else (None, True):
            options = {"temperature": 0, "max_tokens": 2, "logprobs": logprobs}
            whole = call(client, **options).json()
            (choice,) = whole["choices"]
            assert (choice["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 2)
            assert (choice["text"] if call is complete else choice["message"]["content"]) == "\N{REPLACEMENT CHARACTER}"
            if logprobs and call is chat:
                assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[0xE2], [0x82]]
            elif logprobs:
                assert choice["logprobs"]["tokens"] == ["bytes:\\xe2", "bytes:\\x82"]
            parts = [chunk["choices"][0] for chunk in payloads(call(client, **options, stream=True))]
            texts = [part["text"] if call is complete else part["delta"].get("content", "") for part in parts]
            assert "".join(texts) == "\N{REPLACEMENT CHARACTER}"
            assert parts[-1]["finish_reason"] == "length"


def test_stop_strings_end_a_choice_and_its_row(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"ABCDEFGHIJ" * 9, 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        for stream in (False, True):
            before = len(gated.batches)
            call = pool.submit(complete, client, temperature=0, max_tokens=80, stop=["EF", "DEF"], stream=stream)
            gated.await_step()
            for _ in "ABCDEF":
                gated.permit()
                gated.await_step()
            answer = call.result()
            choices = [chunk["choices"][0] for chunk in payloads(answer)] if stream else answer.json()["choices"]
            assert "".join(choice["text"] for choice in choices) == "ABC"
            assert choices[-1]["finish_reason"] == "stop"
            assert stream or answer.json()["usage"]["completion_tokens"] == 6
            gated.permit()
            server.await_idle()
            assert len(gated.batches) - before == 7  # the step that ran when the stop was found is the last


@pytest.mark.parametrize("call", [complete, chat])
def test_characters_of_several_tokens_arrive_whole(tmp_path: Path, call: Any) -> None:
    text = "\U0001f469\u200d\U0001f52c\U0001f3fd\u010f"  # a woman, a joiner, a microscope, a skin tone; one letter more
    tape = TapeLM(text.encode(), 0 if call is complete else CHAT_FRAME)
    with serving(tmp_path, LIMITS, tape) as server, server.client() as client:
        options = {"temperature": 0, "max_tokens": 40}
        choice = call(client, **options).json()["choices"][0]
        assert (choice["text"] if call is complete else choice["message"]["content"]) == text
        parts = [chunk["choices"][0] for chunk in payloads(call(client, **options, stream=True))]
        deltas = [part["text"] if call is complete else part["delta"].get("content", "") for part in parts]
        assert "".join(deltas) == text
        assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)


def test_a_prompt_that_ends_inside_a_character_is_not_shown(tmp_path: Path) -> None:
    """The character that prompt and answer make together is the answer's first."""
    prompt, tape = [*b"SECRET \xf0\x9f"], TapeLM(b"\x98\x80!", 8)
    with serving(tmp_path, LIMITS, tape) as server, server.client() as client:
        options = {"prompt": prompt, "temperature": 0, "max_tokens": 8}
        whole = complete(client, **options).json()["choices"][0]["text"]
        streamed = "".join(chunk["choices"][0]["text"] for chunk in payloads(complete(client, **options, stream=True)))
        assert whole == streamed
        assert whole.endswith("!")
        assert "SECRET" not in whole
        assert len(whole) == 2

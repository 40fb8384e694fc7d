"""Answers of the HTTP server: lengths, choices, usage, whole and streamed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ostinato.runtime.answer_completions import CompletionWriter
from ostinato.runtime.stream import Stream
from tests.http_calls import CHAT_FRAME, LIMITS, chat, complete, error_of, payloads
from tests.serving import TapeLM, serving


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [
        (126, "unset", 2), (126, None, 2), (126, 1, 1), (126, 2, 2), (126, 3, "context_length_exceeded"),
        (127, "unset", 1), (127, 1, 1), (127, 2, "context_length_exceeded"), (127, None, 1),
        (128, "unset", "context_length_exceeded"), (128, 1, "context_length_exceeded"),
        (129, "unset", "context_length_exceeded"), (129, None, "context_length_exceeded"),
        (126, 10**9, "context_length_exceeded"), (126, -1, "invalid_value"), (126, 1.5, "invalid_type"),
        (126, True, "invalid_type"), (126, 0, "invalid_value"), (20, "unset", 16),
    ],
)  # fmt: skip
def test_max_tokens_at_the_context_edge(client: httpx.Client, num_prompt: int, max_tokens: Any, expected: Any) -> None:
    fields = {} if max_tokens == "unset" else {"max_tokens": max_tokens}
    answers = [
        complete(client, prompt=[7] * num_prompt, ignore_eos=True, **fields),
        chat(client, "y" * (num_prompt - CHAT_FRAME), ignore_eos=True, **fields),
    ]
    for answer, whole_context in zip(answers, (False, True), strict=True):
        if isinstance(expected, str):
            error = error_of(answer, 400)
            assert error["code"] == expected
            assert "-" not in error["message"].replace("-1", "")
        else:
            usage = answer.json()["usage"]
            assert usage["prompt_tokens"] == num_prompt
            assert usage["completion_tokens"] == (128 - num_prompt if num_prompt == 20 and whole_context else expected)
            assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_n_choices_are_distinct_and_repeat_with_their_seed(client: httpx.Client) -> None:
    first = complete(client, n=8, seed=7, max_tokens=12, ignore_eos=True, logprobs=0).json()
    again = complete(client, n=8, seed=7, max_tokens=12, ignore_eos=True, logprobs=0).json()
    texts = [choice["logprobs"]["tokens"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == list(range(8))
    assert len({tuple(text) for text in texts}) == 8
    assert [choice["logprobs"]["tokens"] for choice in again["choices"]] == texts
    assert (first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]) == (1, 96)
    unseeded = [complete(client, max_tokens=12, ignore_eos=True).json()["choices"][0]["text"] for _ in range(8)]
    assert len(set(unseeded)) == 8
    greedy = complete(client, n=3, temperature=0, max_tokens=12).json()["choices"]
    assert len({choice["text"] for choice in greedy}) == 1


def test_prompts_in_a_list_are_numbered_through_and_equal_their_own_calls(client: httpx.Client) -> None:
    options = {"seed": 5, "n": 2, "max_tokens": 5, "ignore_eos": True}
    together = complete(client, prompt=["ab", "c"], **options).json()
    for offset, prompt in ((0, "ab"), (2, "c")):
        alone = complete(client, prompt=prompt, **options).json()["choices"]
        for choice in alone:
            assert together["choices"][offset + choice["index"]] == choice | {"index": offset + choice["index"]}
    assert together["usage"]["prompt_tokens"] == 3
    by_ids = complete(client, prompt=[[*b"ab"], [*b"c"]], **options).json()
    assert [choice["text"] for choice in by_ids["choices"]] == [choice["text"] for choice in together["choices"]]


@pytest.mark.parametrize("call", [complete, chat])
def test_a_stream_is_the_whole_answer(client: httpx.Client, call: Any) -> None:
    options = {"n": 3, "seed": 3, "max_tokens": 20}
    whole = call(client, **options).json()
    chunks = payloads(call(client, **options, stream=True, stream_options={"include_usage": True}))
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == choice["index"]]
        if call is chat:
            assert "".join(part["delta"].get("content", "") for part in mine) == choice["message"]["content"]
        else:
            assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [choice["finish_reason"]]
    assert chunks[-1]["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}


def test_the_usage_chunk_comes_once_and_only_if_asked_for(client: httpx.Client) -> None:
    options = {"n": 2, "max_tokens": 5, "stream": True, "ignore_eos": True, "prompt": [9] * 33}
    complete(client, **options)  # now two full blocks of the prompt are known
    chunks = payloads(complete(client, **options, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    details = {"cached_tokens": 32}
    expected = {"prompt_tokens": 33, "completion_tokens": 10, "total_tokens": 43, "prompt_tokens_details": details}
    assert chunks[-1]["usage"] == expected
    unasked: list[dict[str, Any]] = [{}, {"stream_options": {"include_usage": False}}, {"stream_options": None}]
    for fields in unasked:
        plain = payloads(complete(client, **options, **fields))
        assert all("usage" not in chunk and chunk["choices"] for chunk in plain)
    for stream in (False, None):
        error = error_of(complete(client, **options | {"stream": stream}, stream_options={"include_usage": True}), 400)
        assert error["param"] == "stream_options"


def test_chat_chunks_begin_with_the_role_and_end_with_a_reason_of_their_own(client: httpx.Client) -> None:
    chunks = payloads(chat(client, stream=True, n=2, max_tokens=3, logit_bias={"256": -100}))
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert mine[-1]["delta"] == {}
        assert mine[-1]["finish_reason"] == "length"
        assert all(part["finish_reason"] is None for part in mine[:-1])
        assert all(list(part["delta"]) == ["content"] and part["delta"]["content"] for part in mine[1:-1])


def test_an_answer_without_a_token_has_role_and_reason(tmp_path: Path) -> None:
    with serving(tmp_path, LIMITS, TapeLM(b"", 0)) as server, server.client() as client:
        chunks = payloads(chat(client, stream=True, temperature=0))
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        whole = chat(client, temperature=0).json()
        assert whole["choices"][0]["message"]["content"] == ""
        assert whole["usage"]["completion_tokens"] == 1


def test_best_of_answers_the_likeliest_of_many(client: httpx.Client) -> None:
    options: dict[str, Any] = {"prompt": ["ab", "c"], "seed": 3, "max_tokens": 6}
    every = complete(client, n=5, logprobs=1, **options).json()
    best = complete(client, n=2, best_of=5, logprobs=1, **options).json()
    for first, shown in ((0, best["choices"][:2]), (5, best["choices"][2:])):
        made = every["choices"][first : first + 5]
        means = [float(np.mean(choice["logprobs"]["token_logprobs"])) for choice in made]
        ranked = [made[index] for index in np.argsort(means)[::-1][:2]]
        assert [choice | {"index": 0} for choice in shown] == [choice | {"index": 0} for choice in ranked]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]  # all that were made
    bare = complete(client, n=2, best_of=5, **options).json()["choices"]
    assert [choice["text"] for choice in bare] == [choice["text"] for choice in best["choices"]]
    assert all(choice["logprobs"] is None for choice in bare)


def test_a_long_answer_is_written_beside_the_streams(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, whole = [], CompletionWriter.whole

    def watched(writer: CompletionWriter, stream: Stream) -> bytes:
        threads.append(threading.current_thread().name)
        return whole(writer, stream)

    monkeypatch.setattr(CompletionWriter, "whole", watched)
    for n in (1, 8):
        reply = complete(client, prompt="x" * 100, echo=True, logprobs=5, max_tokens=1, n=n, seed=1)
        assert [len(choice["logprobs"]["tokens"]) for choice in reply.json()["choices"]] == [101] * n
    assert threads[0] == "server" != threads[1]

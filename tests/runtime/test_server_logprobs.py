"""Logprobs of both endpoints against the model's own rule."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from tests.fakes import histories, logits_of, mix
from tests.http_calls import chat, complete, payloads
from tests.serving import VOCAB_SIZE


def reference_logprobs(ids: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[T, V] natural-log softmax that PosLM's rule gives after each of `ids`."""
    at = np.arange(len(ids))
    kept = histories(at.astype(np.int64), np.array(ids, np.int64)) * (mix(at.astype(np.uint64)) | np.uint64(1))
    logits = logits_of(np.cumsum(kept), VOCAB_SIZE).astype(np.float64)
    logprobs: np.ndarray[Any, np.dtype[np.float64]] = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs


@pytest.mark.parametrize("prompt", ["The sky is blue", [*b"The sky is blue"], "é" * 40])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_scores_the_prompt(client: httpx.Client, prompt: Any, max_tokens: int) -> None:
    ids = [*prompt.encode()] if isinstance(prompt, str) else prompt
    options = {"echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2, "temperature": 0, "prompt": prompt}
    answer = complete(client, **options).json()
    expected = reference_logprobs(ids)
    for choice in answer["choices"]:
        lists, text = choice["logprobs"], choice["text"]
        assert text.startswith(bytes(ids).decode())
        assert all(len(values) == len(ids) + max_tokens for values in lists.values())
        assert lists["token_logprobs"][0] is None
        assert lists["top_logprobs"][0] is None
        np.testing.assert_allclose(
            lists["token_logprobs"][1 : len(ids)], [expected[i, ids[i + 1]] for i in range(len(ids) - 1)], atol=1e-4
        )
        for best, row in zip(lists["top_logprobs"][1:], expected, strict=False):
            np.testing.assert_allclose(sorted(best.values())[-2:], np.sort(row)[-2:], atol=1e-4)
            assert len(best) in (2, 3)
        if text.isascii():
            for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
                assert token.startswith("bytes:") or text[offset:].startswith(token)
        assert lists["text_offset"][: len(ids)] == [
            len(bytes(ids[:i]).decode(errors="ignore")) for i in range(len(ids))
        ]
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    chunks = payloads(complete(client, **options, stream=True))
    for choice in answer["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [item for part in mine if part["logprobs"] for item in part["logprobs"][name]] == values


def test_echo_without_logprobs(client: httpx.Client) -> None:
    assert complete(client, prompt=["ab", "c"], echo=True, max_tokens=0).json()["choices"] == [
        {"index": index, "text": text, "logprobs": None, "finish_reason": "length"}
        for index, text in enumerate(("ab", "c"))
    ]
    chunks = payloads(complete(client, prompt="ab", echo=True, max_tokens=0, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["ab", ""]


def test_chat_logprobs_have_every_token_once_with_its_bytes(client: httpx.Client) -> None:
    options = {"logprobs": True, "top_logprobs": 5, "max_tokens": 30, "seed": 1, "ignore_eos": True}
    whole = chat(client, **options).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"] == 30
    for entry in content:
        best = entry["top_logprobs"]
        assert len(best) == 5
        assert [item["logprob"] for item in best] == sorted((item["logprob"] for item in best), reverse=True)
        assert len({tuple(item["bytes"]) for item in best}) == 5
        assert [item for item in best if item["bytes"] == entry["bytes"]] in (
            [],
            [{key: entry[key] for key in ("token", "logprob", "bytes")}],
        )
        if len(entry["bytes"]) == 1 and entry["bytes"][0] > 127:
            assert entry["token"] == f"bytes:\\x{entry['bytes'][0]:02x}"
    chunks = payloads(chat(client, **options, stream=True))
    streamed = [part for chunk in chunks if (part := chunk["choices"][0]["logprobs"])]
    assert [entry for part in streamed for entry in part["content"]] == content
    few = chat(client, **options | {"top_logprobs": 0}).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in few] == [entry["logprob"] for entry in content]


def test_scores_of_prompts_in_a_list_are_those_of_each_alone(client: httpx.Client) -> None:
    options: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0}
    prompts = ["The sky is blue", "x", "naïve"]
    together = complete(client, prompt=prompts, **options).json()
    alone = [complete(client, prompt=prompt, **options).json()["choices"][0] for prompt in prompts]
    assert [choice | {"index": 0} for choice in together["choices"]] == alone
    assert together["usage"]["prompt_tokens"] == sum(len(prompt.encode()) for prompt in prompts)
    assert together["usage"]["completion_tokens"] == 0

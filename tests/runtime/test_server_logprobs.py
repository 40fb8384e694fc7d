"""Logprobs of both endpoints against the model's own rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ostinato.runtime.detokenizer import MARK
from tests.fakes import histories, logits_of, mix
from tests.http_calls import LIMITS, chat, complete, payloads
from tests.serving import VOCAB_SIZE, TapeLM, serving
from tests.tokenizers import EOS


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


def check_offsets(choice: Any, *, is_cut: bool = False) -> None:
    """They rise, lie in the text that is sent, and each token that is text is there, as far as a stop lets it."""
    text, lists = choice["text"], choice["logprobs"]
    offsets = lists["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset, following in zip(lists["tokens"], offsets, [*offsets[1:], len(text)], strict=True):
        assert 0 <= offset <= len(text)
        if not token.startswith(("bytes:", "<")):
            shown = text[offset:following]
            assert shown.rstrip(MARK) == token or (is_cut and token.startswith(shown))


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"ignore_eos": True, "logit_bias": {str(EOS): 6}}, {"ignore_eos": True, "logit_bias": {str(EOS): 100}},
        {"ignore_eos": True, "logit_bias": {str(EOS): 6}, "skip_special_tokens": False},
        {"ignore_eos": True, "logit_bias": {"97": 9, "98": 9}, "stop": ["aab", "bba"]},
        {"ignore_eos": True, "logit_bias": {"97": 9, "98": 9}, "stop": "ab", "include_stop_str_in_output": True},
        {"ignore_eos": True, "logit_bias": {"97": 100}, "stop": "aaaa"}, {"ignore_eos": True, "stop_token_ids": [7]},
        {"prompt": [*b"Hello ", 0xF0, 0x9F], "ignore_eos": True, "logit_bias": {"142": 9, "97": 9}},
        {"prompt": [EOS, *b"a", EOS, *b"bc", 0xC3], "ignore_eos": True},
    ],
)  # fmt: skip
def test_offsets_point_into_the_text_that_is_sent(client: httpx.Client, fields: Any, echo: bool) -> None:
    options = {"prompt": "na\u00efve", "max_tokens": 24, "logprobs": 1, "n": 4, "seed": 5, "echo": echo} | fields
    whole = complete(client, **options).json()
    chunks = payloads(complete(client, **options, stream=True))
    for choice in whole["choices"]:
        check_offsets(choice, is_cut="stop" in fields)
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        offsets = [place for part in mine if part["logprobs"] for place in part["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("tape", "text"),
    [
        (b"\x8e\x89!", "Hello 🎉!"), (b"a\x89!", "Hello \ufffda\ufffd!"), (b"", "Hello \ufffd"),
        (b"\xf0\x9f\x8e\x89", "Hello \ufffd🎉"), (b"\x8e", "Hello \ufffd"),
    ],
)  # fmt: skip
def test_an_echo_shows_a_character_that_its_output_ends_once(tmp_path: Path, tape: bytes, text: str) -> None:
    prompt = [*b"Hello ", 0xF0, 0x9F]
    with serving(tmp_path, LIMITS, TapeLM(tape, len(prompt) - 1)) as server, server.client() as client:
        options = {"prompt": prompt, "temperature": 0, "logprobs": 0}
        whole = complete(client, **options, echo=True).json()["choices"][0]
        check_offsets(whole)
        assert whole["text"] == text
        parts = payloads(complete(client, **options, echo=True, stream=True))
        assert "".join(part["choices"][0]["text"] for part in parts) == text
        assert complete(client, prompt=prompt, echo=True, max_tokens=0).json()["choices"][0]["text"] == "Hello \ufffd"
        alone = complete(client, **options).json()["choices"][0]
        assert alone["text"] == text.removeprefix("Hello ").removeprefix("\ufffd")  # which is the prompt's


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

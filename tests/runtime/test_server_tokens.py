"""Tokenize and detokenize: the tokens that an answer would be counted by, and back."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.http_calls import chat, complete, error_of
from tests.serving import MODEL, VOCAB_SIZE
from tests.tokenizers import EOS

TURN = [{"role": "user", "content": "né"}]


def tokenize(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/tokenize", json=fields)


def test_a_text_and_back(client: httpx.Client) -> None:
    answer = tokenize(client, model=MODEL, prompt="né", return_token_strs=True).json()
    assert answer == {
        "count": 3,
        "max_model_len": 128,
        "tokens": [*"né".encode()],
        "token_strs": ["n", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert tokenize(client, prompt="né", add_special_tokens=False).json() == answer | {"token_strs": None}
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "né"}
    assert client.post("/detokenize", json={"tokens": [104, EOS]}).json() == {"prompt": "h<eos>"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_counts_are_those_of_the_answers(client: httpx.Client) -> None:
    """The two paths to a prompt's tokens give the same ones: no token is added twice."""
    asked = {"model": MODEL, "messages": TURN}
    counted = tokenize(client, **asked).json()
    assert bytes(counted["tokens"]) == "user:né\nassistant:".encode()
    answer = chat(client, "né", max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == counted["count"]
    same = complete(client, prompt=counted["tokens"], max_tokens=1).json()
    assert same["usage"]["prompt_tokens"] == counted["count"]
    bare = tokenize(client, **asked, add_generation_prompt=False).json()
    assert bytes(bare["tokens"]) == "user:né\n".encode()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "messages": TURN}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": TURN, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x" * (2**20 + 1)}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages"),
        ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"), ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (2**18 + 1)}, "tokens"), ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)  # fmt: skip
def test_what_is_refused_names_its_field(client: httpx.Client, path: str, fields: Any, param: str) -> None:
    error = error_of(client.post(path, json=fields), 400)
    assert (error["param"] or "").split(".")[0] == param


def test_another_model_is_not_found(client: httpx.Client) -> None:
    for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert error_of(client.post(path, json={**fields, "model": "other"}), 404)["code"] == "model_not_found"


def test_a_conversation_with_tool_calls_is_counted_as_the_chat_counts_it(client: httpx.Client) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "b"},
    ]
    answer = client.post("/v1/chat/completions", json={"model": MODEL, "messages": turns, "max_tokens": 1}).json()
    assert tokenize(client, messages=turns).json()["count"] == answer["usage"]["prompt_tokens"]

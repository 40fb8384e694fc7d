"""Requests that are malformed in every way that servers of this kind have tripped over, with the answer that is right.

An entry is raw bytes for a route, so that what no JSON library would write is here too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
JSON = {"content-type": "application/json"}
_MODEL = {"model": "toy"}
BASES: Mapping[str, Mapping[str, Any]] = {
    CHAT: {**_MODEL, "messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {**_MODEL, "prompt": "x"},
    RESPONSES: {**_MODEL, "input": "x"},
    TOKENIZE: {**_MODEL, "prompt": "x"},
    DETOKENIZE: {**_MODEL, "tokens": [1]},
}


class Malformed(NamedTuple):
    """`param`: what the error must name, None where no field is at fault."""

    name: str
    path: str
    body: bytes
    status: int = 400
    param: str | None = None
    method: str = "POST"
    headers: Mapping[str, str] = JSON


def book() -> list[Malformed]:
    """All of them; names are distinct."""
    entries = [*_no_json(), *_fields(), *_prompts(), *_conversations(), *_tokens(), *_protocol(), *_grammars()]
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    return entries


def _with(path: str, name: str, fields: Mapping[str, Any], param: str | None) -> Malformed:
    body = json.dumps({**BASES[path], **fields}).encode()
    return Malformed(f"{path} {name}", path, body, 400, param)


def _each(path: str, field: str, values: Iterable[Any]) -> Iterator[Malformed]:
    for number, value in enumerate(values):
        yield _with(path, f"{field} {number}", {field: value}, field)


def _no_json() -> Iterator[Malformed]:
    raws = {
        "empty": b"",
        "null": b"null",
        "list": b"[]",
        "text": b'"x"',
        "number": b"5",
        "open": b"{",
        "cut": b'{"model":"toy","prompt":"x"',
        "two": b'{"model":"toy"} {"model":"toy"}',
        "trailing comma": b'{"model":"toy",}',
        "single quotes": b"{'model':'toy'}",
        "comment": b'{"model":"toy" /* x */}',
        "gzip": b"\x1f\x8b\x08\x00\x00",
        "utf-16": "{}".encode("utf-16"),
        "utf-32": "{}".encode("utf-32"),
        "bom": b"\xef\xbb\xbf{}",
        "latin-1": b'{"model":"t\xf6y"}',
        "nul": b"\x00",
        "deep lists": b"[" * 10_000,
        "deep objects": b'{"a":' * 10_000,
        "deep inside": b'{"model":"toy","prompt":"x","x":' + b"[" * 500 + b"]" * 500 + b"}",
        "nan": b'{"model":"toy","prompt":"x","temperature":NaN}',
        "infinity": b'{"model":"toy","prompt":"x","temperature":Infinity}',
        "minus infinity": b'{"model":"toy","prompt":"x","temperature":-Infinity}',
        "1e400": b'{"model":"toy","prompt":"x","temperature":1e400}',
        "leading zero": b'{"model":"toy","prompt":"x","n":01}',
        "plus": b'{"model":"toy","prompt":"x","n":+1}',
        "hexadecimal": b'{"model":"toy","prompt":"x","n":0x1}',
        "lone surrogate": b'{"model":"toy","prompt":"\\ud800"}',
        "surrogate as bytes": b'{"model":"toy","prompt":"\xed\xa0\x80"}',
        "surrogate as a name": b'{"model":"toy","prompt":"x","\\udfff":1}',
        "overlong": b'{"model":"toy","prompt":"\xc0\x80"}',
        "raw control": b'{"model":"toy","prompt":"a\x01b"}',
        "bad escape": b'{"model":"toy","prompt":"\\x41"}',
    }
    for name, raw in raws.items():
        for path in (CHAT, COMPLETIONS, RESPONSES):
            yield Malformed(f"{path} json {name}", path, raw)


def _fields() -> Iterator[Malformed]:
    """Sampling fields, in every endpoint that has them."""
    numbers = ["1", True, [], {}, 10**300]
    table: dict[str, list[Any]] = {
        "temperature": [*numbers, -0.1, 100.5, -1e300],
        "top_p": [*numbers, -0.1, 1.1],
        "min_p": [*numbers, -0.1, 2],
        "presence_penalty": [*numbers, 2.1, -2.1],
        "frequency_penalty": [*numbers, 2.1, -2.1],
        "repetition_penalty": [*numbers, 0, -1],
        "seed": ["1", True, 1.5, 2**64, -(2**63) - 1],
        "top_k": ["1", True, 1.5],
        "min_tokens": [-1, 1.5, True, 10**9],
        "stop": ["", [""], ["a", ""], [*"abcde"], [1], 1, {"a": 1}, ["x" * 257], [None], [["a"]]],
        "stop_token_ids": [["a"], [True], 7, [1] * 1025, [[1]], [-1], [10**6], [2**40], [1.0]],
        "logit_bias": [
            {"1": 101}, {"1": -101}, {"a": 1}, {"-1": 1}, {"01": 1}, {" 1": 1}, {"1": True}, [1], {"9" * 40: 1},
            {str(key): 1 for key in range(1025)}, {"999999": 1},
        ],
        "ignore_eos": [1, "true"],
        "stream": [1, "true"],
        "cache_salt": [1, "x" * 257],
        "priority": [1.5, "high", 2**40],
        "user": [5, ["x"]],
        "model": [5, None, ["toy"]],
    }  # fmt: skip
    for field, values in table.items():
        for path in (CHAT, COMPLETIONS, RESPONSES):
            yield from _each(path, field, values)
    for path in (CHAT, COMPLETIONS):
        yield from _each(path, "n", [0, -1, 129, 10**9, 1.0, True, "1", [1]])
        yield from _each(path, "max_tokens", [-1, 1.5, True, "5", 0, 10**9, 10**30])
        yield from _each(path, "stream_options", [1, {"include_usage": True}, {"x": 1}, [], {"include_usage": 1}])
    for field in ("audio", "functions", "tools", "prediction", "service_tier", "store", "web_search_options"):
        yield _with(COMPLETIONS, f"unserved {field}", {field: {"a": 1}}, field)
        yield _with(CHAT, f"unserved {field}", {field: "x"}, field)


def _prompts() -> Iterator[Malformed]:
    forms: list[Any] = [
        None, 5, 1.5, True, {}, [], [[]], [1, "a"], ["a", 1], ["a", [1]], [True], [1.0], [[1], [True]], [None], [["a"]],
        [[[1]]], ["a"] * 65, "", [-1], [[-1]], [2**40], [10**6], [[1], [10**6]], "y" * 300, [1] * 200, [""],
    ]  # fmt: skip
    yield from _each(COMPLETIONS, "prompt", forms)
    yield from _each(COMPLETIONS, "logprobs", [6, -1, True, "1", 1.5])
    yield from _each(COMPLETIONS, "best_of", [0, -1, 129, 10**9, True, "2"])
    yield from _each(COMPLETIONS, "echo", [1, "yes"])
    yield from _each(COMPLETIONS, "suffix", ["x", "", 5])
    yield _with(COMPLETIONS, "best_of below n", {"n": 3, "best_of": 2}, "best_of")
    yield _with(COMPLETIONS, "best_of in a stream", {"best_of": 2, "stream": True}, "best_of")
    yield _with(COMPLETIONS, "prompts times n", {"prompt": ["a"] * 64, "n": 3}, "n")
    yield Malformed("no prompt", COMPLETIONS, b'{"model":"toy"}', 400, "prompt")
    yield Malformed("no model", COMPLETIONS, b'{"prompt":"x"}', 400, "model")
    yield Malformed("another model", COMPLETIONS, b'{"model":"gpt-9","prompt":"x"}', 404, "model")


def _conversations() -> Iterator[Malformed]:
    turn = {"role": "user", "content": "x"}
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}
    turns: list[Any] = [
        None, [], {}, "x", 5, [1], [[]], ["x"], [None], [{"role": "banana", "content": "x"}], [{"role": "user"}],
        [{"content": "x"}], [{"role": 5, "content": "x"}], [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [image]}], [{"role": "user", "content": [5]}],
        [{"role": "user", "content": {"a": 1}}], [{"role": "user", "content": "x", "audio": {"id": "a"}}],
        [{"role": "user", "content": "x", "name": 5}], [{"role": "user", "content": 1}] * 5000, [turn] * 4097,
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    ]  # fmt: skip
    yield from _each(CHAT, "messages", turns)
    parts = [{"type": "input_image", "image_url": "http://127.0.0.1/x"}]
    items: list[Any] = [
        *(turn for turn in turns[:18] if turn != "x"),
        [{"type": "item_reference", "id": "x"}],
        [{"role": "user", "content": parts}],
    ]
    yield from _each(RESPONSES, "input", items)
    yield from _each(CHAT, "logprobs", [1, "true"])
    yield from _each(CHAT, "top_logprobs", [2, -1, 21, True])
    yield from _each(CHAT, "max_completion_tokens", [-1, 1.5, True, "5"])
    yield _with(CHAT, "two caps", {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens")
    yield _with(CHAT, "a wish for 21", {"logprobs": True, "top_logprobs": 21}, "top_logprobs")
    yield from _each(RESPONSES, "max_output_tokens", [-1, 0, 1.5, True, "5", 10**9])
    yield from _each(RESPONSES, "previous_response_id", ["resp_1", 5])
    yield from _each(RESPONSES, "store", [True, 0, "no"])
    yield from _each(RESPONSES, "text", ["x", {"format": "json"}, {"format": {"type": "xml"}}, {"verbosity": "high"}])
    yield from _each(RESPONSES, "metadata", [{"a": 1}, [], {"x" * 65: "a"}, {str(key): "" for key in range(17)}])
    yield from _each(RESPONSES, "include", ["x", ["x"], [1]])
    yield from _each(RESPONSES, "instructions", [5, ["x"]])
    yield Malformed("long text as a conversation", CHAT, json.dumps({**_MODEL, "messages": "x" * 10**6}).encode())


def _tokens() -> Iterator[Malformed]:
    yield from _each(TOKENIZE, "prompt", [5, ["x"], None, {}])
    yield from _each(TOKENIZE, "add_special_tokens", [1, "x"])
    yield _with(TOKENIZE, "both", {"messages": [{"role": "user", "content": "x"}]}, "prompt")
    yield from _each(DETOKENIZE, "tokens", [None, 5, "x", ["x"], [-1], [10**6], [2**70], [True], [1.0], [[1]]])


def _protocol() -> Iterator[Malformed]:
    body = json.dumps(BASES[COMPLETIONS]).encode()
    for media_type in (
        "text/plain",
        "application/xml",
        "multipart/form-data",
        "application/x-www-form-urlencoded",
        "x",
    ):
        yield Malformed(f"media {media_type}", COMPLETIONS, body, 415, headers={"content-type": media_type})
    for encoding in ("gzip", "br", "zstd", "deflate"):
        headers = {**JSON, "content-encoding": encoding}
        yield Malformed(f"encoding {encoding}", COMPLETIONS, body, 415, headers=headers)
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        yield Malformed(f"method {method}", CHAT, b"", 405, method=method)
    for path in ("/", "/v1", "/v1/nothing", "/v1/completions/", "/v2/completions", "/%00", "/v1/models/none", "/docs"):
        yield Malformed(f"path {path}", path, b"", 404, method="GET", param="model" if "none" in path else None)
    for path in ("/v1/embeddings", "/v1/images/generations", "/v1/audio/speech", "/v1/files"):
        yield Malformed(f"path {path}", path, body, 404)


def _grammars() -> Iterator[Malformed]:
    """Formats that are wrong by their shape alone."""
    formats = ["json", 5, [], {}, {"type": "xml"}, {"type": 5}, {"type": "json_schema"}]
    for number, value in enumerate([*formats, {"type": "json_schema", "json_schema": 5}]):
        yield _with(CHAT, f"format {number}", {"response_format": value}, "response_format")

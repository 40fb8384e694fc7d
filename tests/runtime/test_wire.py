"""Bodies: what is taken, what is refused, and that a refusal names the field and repeats nothing."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.chunks import to_json
from ostinato.runtime.request import SamplingParams
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.wire import check_stream
from ostinato.runtime.wire_chat import ChatBody, turns_of
from ostinato.runtime.wire_completions import CompletionBody
from ostinato.runtime.wire_limits import check_limits
from ostinato.runtime.wire_parse import parse_body
from ostinato.runtime.wire_unserved import UNSERVED

LIMITS = ServeLimits()
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "toy", "prompt": "x"}


def chat(**fields: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps(CHAT | fields).encode(), None, LIMITS.max_messages)


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps(COMPLETION | fields).encode())


def refused(make: Any, **fields: Any) -> RequestError:
    """The refusal of a body, wherever on its way it comes."""
    with pytest.raises(RequestError) as caught:
        check_whole(make(**fields))
    assert len(str(caught.value)) < 2000
    return caught.value


def check_whole(body: ChatBody | CompletionBody) -> None:
    check_stream(body.stream, body.stream_options)
    if isinstance(body, CompletionBody):
        check_limits(body.params(LIMITS), len(body.prompts(LIMITS)), LIMITS)
    else:
        check_limits(body.params(LIMITS), 1, LIMITS)


def test_defaults_are_openais() -> None:
    assert chat().params(LIMITS) == SamplingParams(temperature=1.0, top_p=1.0, n=1, max_tokens=None)
    assert completion().params(LIMITS) == SamplingParams(max_tokens=16)


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "seed": 7, "min_tokens": 2, "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "n": 3,
    }  # fmt: skip
    lists: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [1, 2], "logit_bias": {"5": -1.5, "0": 2}}
    expected = SamplingParams(
        **fields, stop=("a", "b"), stop_token_ids=(1, 2), logit_bias=((5, -1.5), (0, 2.0)), max_tokens=9
    )
    assert chat(**fields, **lists, max_tokens=9).params(LIMITS) == expected
    assert completion(**fields, **lists, max_tokens=9).params(LIMITS) == expected
    assert chat(cache_salt="s", priority=-1, user="u").cache_salt == "s"


def test_null_means_unset() -> None:
    nulls = dict.fromkeys([*ChatBody.model_fields, *UNSERVED])
    assert chat(**(nulls | CHAT)).params(LIMITS) == SamplingParams()


@pytest.mark.parametrize(
    ("stop", "expected"), [(None, ()), ([], ()), ("a", ("a",)), (["a"], ("a",)), (["a", "b", "c", "d"], (*"abcd",))]
)
def test_stop_forms(stop: object, expected: tuple[str, ...]) -> None:
    assert chat(stop=stop).params(LIMITS).stop == expected
    assert completion(stop=stop).params(LIMITS).stop == expected


@pytest.mark.parametrize("stop", ["", [""], ["ok", ""], [*"abcde"], [1], 1, {"a": 1}, ["x" * 257], [None]])
def test_stops_that_are_refused(stop: object) -> None:
    for make in (chat, completion):
        assert (refused(make, stop=stop).param or "").startswith("stop")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", True), ("temperature", "1"), ("temperature", 1e9), ("top_p", 1.1),
        ("top_p", -0.1), ("min_p", 2), ("repetition_penalty", 0), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1), ("n", 0), ("n", 129), ("n", 1.0), ("n", True), ("n", "1"), ("seed", 1.5),
        ("seed", True), ("seed", -(2**63) - 1), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True),
        ("max_tokens", 0), ("min_tokens", -1), ("top_k", 1.5), ("ignore_eos", 1), ("ignore_eos", "true"),
        ("stream", 1), ("stop_token_ids", [1, "a"]), ("stop_token_ids", [True]), ("stop_token_ids", 7),
        ("stop_token_ids", [1] * 1025), ("stop_token_ids", [[1]]),
        ("logit_bias", {"1": 101}), ("logit_bias", {"a": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"01": 1}),
        ("logit_bias", {" 1": 1}), ("logit_bias", {"1": True}), ("logit_bias", [1]),
        ("logit_bias", {str(key): 1 for key in range(1025)}), ("cache_salt", 1), ("cache_salt", "x" * 257),
        ("priority", 1.5), ("user", 5), ("model", 5), ("stream_options", {"include_usage": True}),
        ("stream_options", 1),
    ],
)  # fmt: skip
def test_values_that_are_refused_name_their_field(field: str, value: object) -> None:
    for make in (chat, completion):
        error = refused(make, **{field: value})
        assert (error.param or "").split(".")[0] == field, error


def test_unknown_fields_are_refused_by_name() -> None:
    for name in ("unheard_of", "temprature", "x" * 5000, "\r\nx"):
        error = refused(chat, **{name: 1})
        assert error.code == "unknown_parameter"
        assert error.param is not None
        assert name[:60] in error.param
    assert refused(completion, messages=[]).param == "messages"
    assert refused(chat, prompt="x").param == "prompt"
    assert refused(chat, echo=True).param == "echo"
    chat(stream=True, stream_options={"include_obfuscation": False})
    for name in ("include_obfuscation", "unheard_of"):
        assert refused(chat, stream=True, stream_options={name: True}).param == f"stream_options.{name}"


def test_unknown_fields_may_be_left_out_and_told_of() -> None:
    ignored: list[str] = []
    raw = json.dumps(CHAT | {"unheard_of": 1, "x" * 5000: 2, "temprature": None, "seed": 7}).encode()
    assert parse_body(ChatBody, raw, ignored) == chat(seed=7)
    assert [name[:10] for name in ignored] == ["unheard_of", "x" * 10, "temprature"]
    assert max(map(len, ignored)) < 100
    with pytest.raises(RequestError):
        parse_body(ChatBody, json.dumps(CHAT | {"audio": {}}).encode(), [])


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"null", b"[]", b'"x"', b"{", b"\x1f\x8b\x08", "{}".encode("utf-16"), b"\xef\xbb\xbf{}", b"[" * 10_000,
        b'{"a":' * 10_000, b'{"model":"toy","prompt":"x","temperature":NaN}',
        b'{"model":"toy","prompt":"x","temperature":Infinity}', b'{"model":"toy","prompt":"x","temperature":1e309}',
        b'{"model":"toy","prompt":"\\ud800"}', b'{"model":"toy","prompt":"\xed\xa0\x80"}', b"{'model':'toy'}",
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    for kind in (ChatBody, CompletionBody):
        with pytest.raises(RequestError) as caught:
            parse_body(kind, raw)
        assert caught.value.code == "invalid_json"


def test_a_refusal_repeats_no_value_and_stays_short() -> None:
    secret = "SECRET" * 1000
    for fields in (
        {"messages": secret},
        {"messages": [{"role": "user", "content": 1}] * 4000},
        {"messages": [{"role": secret, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": secret, "text": secret}]}]},
        {"messages": [{"role": "user", "content": {"a": secret}}]},
        {"stop": [{"a": secret}]},
        {"temperature": secret},
        {"logit_bias": {"1": secret}},
    ):
        message = str(refused(chat, **fields))
        assert "SECRET" not in message
        assert len(message) < 1000


def test_many_faults_are_refused_without_looking_at_all_of_them() -> None:
    for fields in ({"stop": [1] * 300_000}, {"stop_token_ids": ["a"] * 300_000}, {"messages": [1] * 300_000}):
        assert len(str(refused(chat, **fields))) < 300


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "developer", "content": "a"}], [{"role": "system", "content": "a"}]),
        ([{"role": "user", "content": ""}], [{"role": "user", "content": ""}]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "user", "content": "ab"}],
        ),
        ([{"role": "user", "content": "a", "name": 'q"x'}], [{"role": "user", "content": "a", "name": 'q"x'}]),
        (
            [{"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "annotations": []}],
            [{"role": "assistant", "content": "a"}],
        ),
    ],
)
def test_messages_for_the_template(messages: list[Any], expected: list[dict[str, str]]) -> None:
    assert turns_of(chat(messages=messages).messages) == expected


@pytest.mark.parametrize(
    "messages",
    [
        None, [], {}, "x", [1], [{"role": "banana", "content": "x"}], [{"role": "user"}], [{"content": "x"}],
        [{"role": "user", "content": None}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": [5]}], [{"role": "user", "content": "x", "weight": 1}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "x", "name": 5}], [{"role": "user", "content": "x"}] * 4097,
    ],
)  # fmt: skip
def test_messages_that_are_refused(messages: object) -> None:
    assert (refused(chat, messages=messages).param or "").startswith("messages")


def test_chat_caps_and_logprobs() -> None:
    assert chat(max_completion_tokens=5).params(LIMITS).max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).params(LIMITS).max_tokens == 5
    assert refused(chat, max_completion_tokens=5, max_tokens=6).param == "max_completion_tokens"
    assert refused(chat, max_completion_tokens=0).param == "max_completion_tokens"
    assert refused(chat, max_tokens=0).param == "max_tokens"
    assert chat(logprobs=False).params(LIMITS).logprobs is None
    assert chat(logprobs=True).params(LIMITS).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params(LIMITS).logprobs == 20
    for fields in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}):
        assert refused(chat, **fields).param == "top_logprobs"
    assert refused(chat, logprobs=1).param == "logprobs"


def test_json_has_no_line_end_of_any_kind() -> None:
    text = "".join(map(chr, [*range(0x20), 0x7F, 0x85, 0x2028, 0x2029, 0xE2, 0x80, 0xA8, 0x20A8, 0x1F600, 0xC285]))
    encoded = to_json({"text": text})
    assert len(encoded.decode().splitlines()) == 1
    assert orjson.loads(encoded) == {"text": text}
    for code in range(0x110000):
        if not 0xD800 <= code < 0xE000 and len(f"a{chr(code)}b".splitlines()) > 1:
            assert len(to_json(chr(code)).decode().splitlines()) == 1

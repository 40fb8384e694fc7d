"""Bodies of /v1/responses: what is taken, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.grammar_spec import GrammarSpec
from ostinato.runtime.request import SamplingParams
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.wire import parse_body
from ostinato.runtime.wire_responses import INCLUDE_LOGPROBS, UNSERVED, ResponseBody

LIMITS = ServeLimits()
SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}}


def response(**fields: Any) -> ResponseBody:
    raw = json.dumps({"model": "toy", "input": "hi"} | fields).encode()
    return parse_body(ResponseBody, raw, None, LIMITS.max_messages)


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check(**fields)
    return caught.value


def check(**fields: Any) -> None:
    body = response(**fields)
    body.params(LIMITS)
    body.messages()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [("user", "hi")]),
        ({"instructions": "be brief"}, [("system", "be brief"), ("user", "hi")]),
        ({"input": [{"role": "developer", "content": "a"}]}, [("system", "a")]),
        (
            {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}] * 2}]},
            [("user", "aa")],
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "a"},
                    {
                        "id": "msg_1",
                        "type": "message",
                        "role": "assistant",
                        "status": "completed",
                        "phase": None,
                        "content": [
                            {"type": "output_text", "text": "b", "annotations": [], "logprobs": [{"token": "b"}]}
                        ],
                    },
                ]
            },
            [("user", "a"), ("assistant", "b")],
        ),
    ],
)  # fmt: skip
def test_input_becomes_turns_of_a_conversation(fields: Any, expected: list[tuple[str, str]]) -> None:
    assert [(turn["role"], turn["content"]) for turn in response(**fields).messages()] == expected


@pytest.mark.parametrize(
    "given",
    [
        None, [], {}, 5, [5], ["x"], [{"role": "banana", "content": "x"}], [{"role": "user"}], [{"content": "x"}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}],
        [{"type": "item_reference", "id": "x"}], [{"type": "reasoning", "summary": []}],
        [{"role": "user", "content": "x", "weight": 1}], [{"role": "user", "content": "x"}] * 4097,
    ],
)  # fmt: skip
def test_input_that_is_refused(given: object) -> None:
    assert (refused(input=given).param or "").startswith("input")


def test_items_that_are_not_served_are_named() -> None:
    error = refused(input=[{"role": "user", "content": "a"}, {"type": "function_call_output", "call_id": "1"}])
    assert error.param == "input.1"
    assert "function_call_output are not supported" in str(error)


def test_sampling_fields_arrive() -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "top_k": 3, "min_p": 0.1, "ignore_eos": True}
    body = response(**fields, max_output_tokens=9, stop="a", include=[INCLUDE_LOGPROBS], top_logprobs=2)
    assert body.params(LIMITS) == SamplingParams(**fields, stop=("a",), max_tokens=9, logprobs=2)
    assert response().params(LIMITS) == SamplingParams()
    assert response(include=[INCLUDE_LOGPROBS]).params(LIMITS).logprobs == 0


@pytest.mark.parametrize("name", UNSERVED)
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    error = refused(**{name: {"some": "wish"}})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    check(**{name: None})
    for neutral in UNSERVED[name]:
        check(**{name: neutral})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_output_tokens", 0), ("max_output_tokens", -1), ("max_output_tokens", 1.5), ("max_output_tokens", True),
        ("store", True), ("previous_response_id", "resp_1"), ("background", True), ("top_logprobs", 21),
        ("top_logprobs", -1), ("top_logprobs", 2), ("include", ["reasoning.encrypted_content"]), ("include", "x"),
        ("include", [INCLUDE_LOGPROBS] * 9), ("metadata", {"a": 1}), ("metadata", {"x" * 65: "a"}),
        ("metadata", {"a": "x" * 513}), ("metadata", {str(key): "" for key in range(17)}), ("truncation", "auto"),
        ("instructions", ["x"]), ("stream_options", {"include_obfuscation": True}), ("temperature", -1),
        ("stream_options", {"include_obfuscation": False}), ("text", {"verbosity": "high"}), ("text", {"x": 1}),
        ("text", {"format": {"type": "xml"}}), ("text", {"format": {"type": "json_schema", "name": "a"}}),
        ("text", {"format": {"type": "json_schema", "schema": SCHEMA}}), ("text", {"format": {"schema": SCHEMA}}),
        ("text", {"format": {"type": "json_schema", "name": "a b", "schema": SCHEMA}}),
        ("text", {"format": {"type": "json_object", "schema": SCHEMA}}),
        ("text", {"format": {"type": "text", "name": "a"}}),
        ("n", 2), ("max_tokens", 5), ("messages", []), ("response_format", {"type": "json_object"}),
    ],
)  # fmt: skip
def test_values_that_are_refused_name_their_field(field: str, value: object) -> None:
    assert (refused(**{field: value}).param or "").split(".")[0] == field


def test_formats_become_grammars() -> None:
    assert response().grammar() is None
    assert response(text={"format": {"type": "text"}}).grammar() is None
    assert response(text={"format": {"type": "json_object"}}).grammar() == GrammarSpec("json_object", "", "text.format")
    wanted = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": False}
    spec = response(text={"format": wanted}).grammar()
    assert spec is not None
    assert (spec.kind, spec.param, json.loads(spec.source)) == ("json_schema", "text.format", SCHEMA)

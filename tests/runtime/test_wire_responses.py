"""Bodies of /v1/responses: what is taken, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.grammar_spec import GrammarSpec
from ostinato.runtime.request import SamplingParams
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.wire_chat import ChatBody
from ostinato.runtime.wire_parse import parse_body
from ostinato.runtime.wire_responses import INCLUDE_LOGPROBS, ResponseBody

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
    error = refused(input=[{"role": "user", "content": "a"}, {"type": "item_reference", "id": "1"}])
    assert error.param == "input.1"
    assert "items of this type are not supported" in str(error)


def call(call_id: str, name: str = "now", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"} | fields


def result(call_id: str, output: Any = "5", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output} | fields


def test_calls_and_results_become_turns() -> None:
    said = {"type": "message", "role": "assistant", "content": "Let me see.", "id": "msg_1", "status": "completed"}
    items = [
        {"role": "user", "content": "a"},
        *(said, call("1", id="fc_1", status="completed"), call("2", "add", arguments='{"x": [1]}')),
        *(result("1", [{"type": "input_text", "text": "noon"}]), result("2"), result("3", name="who"), call("4")),
    ]
    first = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {}}}
    second = {"id": "2", "type": "function", "function": {"name": "add", "arguments": {"x": [1]}}}
    assert response(input=items).messages() == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [first, second]},
        {"role": "tool", "content": "noon", "tool_call_id": "1", "name": "now"},
        {"role": "tool", "content": "5", "tool_call_id": "2", "name": "add"},
        {"role": "tool", "content": "5", "tool_call_id": "3", "name": "who"},
        {"role": "assistant", "content": "", "tool_calls": [first | {"id": "4"}]},
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (call("1", arguments="[]"), "input.0.arguments"), (call("1", arguments="{"), "input.0.arguments"),
        (call("1", "a b"), "input.0.name"), (call("1", weight=1), "input.0.weight"),
        (call("1", output="x"), "input.0.output"), ({"type": "function_call", "name": "now"}, "input.0.call_id"),
        (result("1", 5), "input.0.output"), (result("1", [{"type": "input_image"}]), "input.0.output.0.type"),
        (result("1", role="tool"), "input.0.role"),
        (call("1", arguments='{"a":' * 2000 + "1" + "}" * 2000), "input.0.arguments"),
        (call("1", status="incomplete", arguments='{"a": 1'), "input.0"),
        ({"type": "web_search_call", "id": "1"}, "input.0"),
    ],
)  # fmt: skip
def test_wrong_calls_and_results_are_refused_by_their_path(item: Any, param: str) -> None:
    assert refused(input=[item]).param == param


NAMED = {"type": "function"}
NOW = {"type": "function", "name": "now"}
ADD = {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object"}, "strict": True}


def test_flat_tools_are_the_chats() -> None:
    chosen: list[Any] = [None, "auto", "required", "none", {"type": "function", "name": "add"}]
    for choice in chosen:
        for parallel in (None, True, False):
            fields = {"tools": [NOW, ADD], "tool_choice": choice, "parallel_tool_calls": parallel}
            nested = [
                {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
                for tool in (NOW, ADD)
            ]
            named = choice if choice in (None, "auto", "required", "none") else {"function": {"name": "add"}} | NAMED
            chat = json.dumps(
                {"model": "toy", "messages": [{"role": "user", "content": "x"}]}
                | fields
                | {"tools": nested, "tool_choice": named}
            )
            wanted = parse_body(ChatBody, chat.encode()).tool_use(LIMITS)
            assert response(**fields).tool_use(LIMITS) == wanted
    assert response().tool_use(LIMITS) is None
    assert response(tools=[]).tool_use(LIMITS) is None
    assert response(tools=[], tool_choice="auto").tool_use(LIMITS) is None, "an answer repeats it so"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0"), ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "function": {"name": "now"}}]}, "tools.0.name"),
        ({"tools": [NOW | {"parameters": {"type": "array"}}]}, "tools.0.parameters"),
        ({"tools": [NOW, NOW]}, "tools.1.function.name"), ({"tools": [NOW] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tools": [NOW], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)  # fmt: skip
def test_wrong_tools_are_refused_by_their_path(fields: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        response(**fields).tool_use(LIMITS)
    assert (caught.value.param or "").startswith(param)
    assert "[" not in f"{caught.value.param}", "a union's members are nobody's fields"


def test_sampling_fields_arrive() -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "top_k": 3, "min_p": 0.1, "ignore_eos": True}
    body = response(**fields, max_output_tokens=9, stop="a", include=[INCLUDE_LOGPROBS], top_logprobs=2)
    assert body.params(LIMITS) == SamplingParams(**fields, stop=("a",), max_tokens=9, logprobs=2)
    assert response().params(LIMITS) == SamplingParams()
    assert response(include=[INCLUDE_LOGPROBS]).params(LIMITS).logprobs == 0


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

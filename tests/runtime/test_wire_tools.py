"""Tools in a chat's body: what is taken, what is refused and by which name, and what the template then reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.wire_chat import ChatBody, turns_of
from ostinato.runtime.wire_parse import parse_body
from ostinato.runtime.wire_tools import ToolUse

LIMITS = ServeLimits()
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA} | fields}


def call(call_id: str = "c1", name: str = "f", arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}} | fields


def chat(**fields: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"model": "toy", "messages": [USER]} | fields).encode())


def use_of(**fields: Any) -> ToolUse | None:
    body = chat(**fields)
    body.params(LIMITS)
    return body.tool_use(LIMITS)


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        use_of(**fields)
    assert len(str(caught.value)) < 500
    return caught.value


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_choices() -> None:
    assert use_of() is None
    assert use_of(tools=[], tool_choice="none", parallel_tool_calls=True) is None
    assert use_of(tools=[tool()], tool_choice="none") is None
    for choice, mode in ((None, "auto"), ("auto", "auto"), ("required", "required")):
        for parallel in (None, True, False):
            use = use_of(tools=[tool(), tool("g")], tool_choice=choice, parallel_tool_calls=parallel)
            assert use is not None
            assert (use.mode, use.name, use.at_most_one) == (mode, None, parallel is False)
            assert use.names == {"f", "g"}
            assert use.is_forced == (choice == "required")
    use = use_of(tools=[tool(), tool("g")], tool_choice=named("g"))
    assert use is not None
    assert (use.mode, use.name, use.at_most_one, use.is_forced) == ("named", "g", True, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": named("f")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": named("g")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.function"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": 1}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": [1]}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": {}}, "tools"), ({"tools": "f"}, "tools"), ({"tools": [1]}, "tools.0"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0"),
        ({"tools": [tool(), {"type": "function"}]}, "tools.1.function"),
        ({"tools": [tool(), tool()]}, "tools.1.function.name"),
        ({"tools": [tool("")]}, "tools.0.function.name"), ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("f\n")]}, "tools.0.function.name"), ({"tools": [tool("x" * 65)]}, "tools.0.function.name"),
        ({"tools": [tool('f"}')]}, "tools.0.function.name"), ({"tools": [tool(5)]}, "tools.0.function.name"),  # type: ignore[arg-type]
        ({"tools": [tool(description=5)]}, "tools.0.function.description"),
        ({"tools": [tool(strict="yes")]}, "tools.0.function.strict"),
        ({"tools": [tool(returns={})]}, "tools.0.function.returns"),
        ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools.0.function.parameters"),
        ({"tools": [tool(parameters={"properties": {}})]}, "tools.0.function.parameters"),
        ({"tools": [tool(f"f{number}") for number in range(129)]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"), ({"function_call": "auto"}, "function_call"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.param or "").startswith(param)
    if param in ("functions", "function_call"):
        assert error.code == "unsupported_parameter"


def test_bounds_are_the_servers() -> None:
    tools = [tool(f"f{number}") for number in range(3)]
    assert chat(tools=tools).tool_use(ServeLimits(max_tools=3)) is not None
    for choice in (None, "none"):
        with pytest.raises(RequestError, match="at most 2"):
            chat(tools=tools, tool_choice=choice).tool_use(ServeLimits(max_tools=2))


def test_a_template_reads_tools_whole_and_in_one_order() -> None:
    shuffled = {"function": {"strict": True, "parameters": SCHEMA, "name": "f"}, "type": "function"}
    use = use_of(tools=[shuffled, {"type": "function", "function": {"name": "g", "parameters": {}}}])
    assert use is not None
    shown = [json.dumps(tool.for_template()) for tool in use.tools]
    assert shown == [
        json.dumps({"type": "function", "function": {"name": "f", "description": "", "parameters": SCHEMA}}),
        '{"type": "function", "function": {"name": "g", "description": "", "parameters": '
        '{"type": "object", "properties": {}}}}',
    ]


def test_calls_and_results_of_earlier_turns() -> None:
    messages = [
        USER,
        {
            "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
            "function_call": None, "tool_calls": [
                call(arguments='{"b": 1, "a": [1.5, null, "\\u00e9"]}'), call("c2", "g", " ", index=1),
            ],
        },
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": text} for text in "42"]},
        {"role": "tool", "tool_call_id": "unknown", "content": ""},
        {"role": "assistant", "content": "so", "tool_calls": []},
    ]  # fmt: skip
    first = {"name": "f", "arguments": {"b": 1, "a": [1.5, None, "é"]}}
    assert turns_of(chat(messages=messages).messages) == [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": first},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "42", "name": "g", "tool_call_id": "c2"},
        {"role": "tool", "content": "", "tool_call_id": "unknown"},
        {"role": "assistant", "content": "so"},
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"}, {"role": "tool", "tool_call_id": "c1"}, {"role": "function", "content": "x"},
        {"role": "user", "content": "x", "tool_call_id": "c1"},
        {"role": "user", "content": "x", "tool_calls": [call()]},
        {"role": "assistant"}, {"role": "assistant", "content": None}, {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "tool_calls": [{"id": "1"}]}, {"role": "assistant", "tool_calls": {}},
        *(
            {"role": "assistant", "tool_calls": [wrong]}
            for wrong in (call(arguments={}), call(type="x"), call(name="a b"))
        ),
        *(
            {"role": "assistant", "tool_calls": [call(arguments=arguments)]}
            for arguments in ("[]", "{", "1", '{"a": NaN}', '{"a": ' + "[" * 5000 + "]" * 5000 + "}")
        ),
        {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "content": "x", "refusal": "no"},
        *(
            {"role": "user", "content": [{"type": kind, kind: {"url": "http://x"}}]}
            for kind in ("image_url", "input_audio", "file", "video_url", "refusal")
        ),
    ],
)  # fmt: skip
def test_messages_that_are_refused(message: dict[str, Any]) -> None:
    error = refused(messages=[USER, message])
    assert (error.param or "").startswith("messages.1")
    assert "http" not in str(error)


def test_parts_that_are_not_served_are_named() -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert "image_url" in str(refused(messages=[{"role": "user", "content": parts}]))


def test_how_a_prompt_ends() -> None:
    last = {"role": "assistant", "content": "once"}
    going_on: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    assert use_of(messages=[USER, last], **going_on) is None
    for fields in (
        {"messages": [USER, last], "continue_final_message": True},
        {"messages": [USER], **going_on},
        {"messages": [USER, {"role": "assistant", "tool_calls": [call()]}], **going_on},
    ):
        assert refused(**fields).param == "continue_final_message"


def test_what_a_caller_may_tell_a_template() -> None:
    assert chat().template_variables() == {}
    assert chat(chat_template_kwargs={"enable_thinking": False}).template_variables() == {"enable_thinking": False}
    tables: list[Any] = [
        {"enable_thinking": "no"},
        {"messages": []},
        {"bos_token": "x"},
        {"tools_in_user_message": True},
        [],
    ]
    for table in tables:
        assert (refused(chat_template_kwargs=table).param or "").startswith("chat_template_kwargs")
    for name in ("chat_template", "documents"):
        error = refused(**{name: "{{ 1 }}"})
        assert (error.param, error.code) == (name, "unsupported_parameter")

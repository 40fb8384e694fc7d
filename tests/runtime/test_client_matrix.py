"""OpenAI's own client over a matrix of requests: every reply passes its types, and a stream is the whole answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.fakes import PosLM, make_limits
from tests.serving import MODEL, PATIENCE_SECONDS, VOCAB_SIZE, serving

LIMITS = make_limits(max_rows=8, max_step_tokens=256, max_context=1024)
TURNS: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
UNTYPED = {"store", "timings"}  # the first OpenAI's own, the second asked for
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "cool": {"temperature": 0.3, "top_p": 0.9},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": -0.5},
    "bias": {"logit_bias": {"65": 5, "66": -100}},
    "stop": {"stop": ["A", "b"]},
    "one stop": {"stop": "e"},
    "ours": {"extra_body": {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}},
    "lengths": {"extra_body": {"min_tokens": 3, "ignore_eos": True}},
    "stop ids": {"extra_body": {"stop_token_ids": [65, 66], "include_stop_str_in_output": True}},
    "special": {"extra_body": {"skip_special_tokens": False, "cache_salt": "s", "priority": 1}},
    "user": {"user": "u-1"},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
FLAT_TOOLS: Any = [{"type": "function", "name": "look", "description": "d", "parameters": SCHEMA, "strict": True}]
CHAT_EXTRAS: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 4},
    "chosen": {"logprobs": True},
    "cap": {"max_completion_tokens": 5},
    "object": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
        "max_tokens": 40,
    },
    "choice": {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
    "regex": {"extra_body": {"structured_outputs": {"regex": "[a-f]{4}"}}},
    "tools": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60},
    "named tool": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "max_tokens": 60,
    },
    "no tool": {"tools": TOOLS, "tool_choice": "none"},
    "timings": {"extra_body": {"timings": True}},
    "neutral": {"response_format": {"type": "text"}, "tools": [], "store": False, "service_tier": "auto"},
}
COMPLETION_EXTRAS: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "logprobs": {"logprobs": 3},
    "chosen": {"logprobs": 0},
    "echo": {"echo": True},
    "scored": {"echo": True, "logprobs": 2},
    "list": {"prompt": ["ab", "c"]},
    "best": {"best_of": 1},
    "schema": {"extra_body": {"structured_outputs": {"json": SCHEMA}}, "max_tokens": 30},
    "ids": {"prompt": [97, 98]},
    "lists of ids": {"prompt": [[97], [98, 99]], "n": 2},
}
RESPONSE_EXTRAS: dict[str, dict[str, Any]] = {
    "instructions": {"instructions": "be brief"},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 4},
    "items": {"input": TURNS},
    "parts": {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
    "metadata": {"metadata": {"a": "b"}, "store": False, "truncation": "disabled"},
    "format": {"text": {"format": {"type": "text"}}},
    "schema": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, "max_output_tokens": 40},
    "tools": {"tools": FLAT_TOOLS, "tool_choice": "required", "max_output_tokens": 60},
    "named tool": {
        "tools": FLAT_TOOLS,
        "tool_choice": {"type": "function", "name": "look"},
        "parallel_tool_calls": False,
        "max_output_tokens": 60,
    },
    "offered": {"tools": FLAT_TOOLS, "tool_choice": "auto"},
    "no tool": {"tools": FLAT_TOOLS, "tool_choice": "none"},
    "called": {
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "dark"},
        ]
    },
}


def cases(extras: dict[str, dict[str, Any]]) -> list[Any]:
    """Each setting alone, and each of the endpoint's own with some of the sampling ones."""
    alone = [pytest.param(fields, id=name) for name, fields in (SAMPLING | extras).items()]
    names = ("greedy", "stop", "ours")
    pairs = itertools.product(extras, names)
    return alone + [pytest.param(_both(extras[one], SAMPLING[other]), id=f"{one}+{other}") for one, other in pairs]


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    bodies = {**one.get("extra_body", {}), **other.get("extra_body", {})}
    return one | other | ({"extra_body": bodies} if bodies else {})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    executor = PosLM(LIMITS, VOCAB_SIZE)
    with serving(tmp_path_factory.mktemp("toy"), LIMITS, executor) as server:
        yield server.url + "/v1"


@pytest.fixture(scope="module")
def strict(url: str) -> Iterator[openai.OpenAI]:
    """A client that refuses a reply which its types do not fit."""
    with openai.OpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="module")
def usual(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS) as client:
        yield client


def keeps_to(kind: Any, reply: Any) -> None:
    """The reply has no field that the client's types lack, and none that they take in another form."""
    again = kind.model_validate(reply.model_dump(by_alias=True))
    assert set(_unknown(again)) <= UNTYPED


def _unknown(value: Any) -> list[str]:
    if isinstance(value, list):
        return [name for item in value for name in _unknown(item)]
    if not hasattr(value, "model_extra"):
        return []
    inner = [name for field in type(value).model_fields for name in _unknown(getattr(value, field))]
    return [*(value.model_extra or {}), *inner]


@pytest.mark.parametrize("fields", cases(CHAT_EXTRAS))
def test_chats(strict: openai.OpenAI, fields: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": TURNS, "seed": 5, "max_tokens": 6} | fields
    if "max_completion_tokens" in options:
        del options["max_tokens"]
    whole = strict.chat.completions.create(**options)
    keeps_to(ChatCompletion, whole)
    assert whole.usage is not None
    chunks = list(strict.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        keeps_to(ChatCompletionChunk, chunk)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(whole.choices) == options.get("n", 1)
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert "".join(part.delta.content or "" for part in mine) == (choice.message.content or "")
        assert _calls(mine) == [
            (call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or []
            if call.type == "function"
        ]
        assert mine[-1].finish_reason == choice.finish_reason
        entries = [entry for part in mine if part.logprobs for entry in part.logprobs.content or []]
        assert entries == ((choice.logprobs.content or []) if choice.logprobs else [])
        assert bool(entries) is bool(options.get("logprobs"))


def _calls(parts: list[Any]) -> list[tuple[str, str]]:
    """Name and arguments of each tool call of a stream."""
    calls: dict[int, list[str]] = {}
    for call in (call for part in parts for call in part.delta.tool_calls or []):
        entry = calls.setdefault(call.index, ["", ""])
        entry[0] += call.function.name or ""
        entry[1] += call.function.arguments or ""
    return [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("fields", cases(COMPLETION_EXTRAS))
def test_completions(strict: openai.OpenAI, usual: openai.OpenAI, fields: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "x", "seed": 5, "max_tokens": 6} | fields
    # The types say that every chunk has a reason and every token a logprob. OpenAI's answers have nulls there, and so
    # have ours: such replies are read as the client usually does.
    whole = (usual if options.get("echo") else strict).completions.create(**options)
    if not options.get("echo"):
        keeps_to(Completion, whole)
    assert whole.usage is not None
    chunks = list(usual.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason
        tokens = [token for part in mine if part.logprobs for token in part.logprobs.token_logprobs or []]
        assert tokens == ((choice.logprobs.token_logprobs or []) if choice.logprobs else [])


@pytest.mark.parametrize("fields", cases(RESPONSE_EXTRAS))
def test_responses(strict: openai.OpenAI, fields: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 6} | fields
    unknown_there = {name: options.pop(name) for name in tuple(options) if name in UNKNOWN_TO_RESPONSES}
    options["extra_body"] = {"seed": 5, **unknown_there, **options.get("extra_body", {})}
    whole = strict.responses.create(**options)
    keeps_to(Response, whole)
    events = list(strict.responses.create(**options, stream=True))
    for event in events:
        EVENTS.validate_python(event.model_dump(by_alias=True))
    final = events[-1].response
    assert final.status == whole.status
    assert final.output_text == whole.output_text
    assert [(item.type, getattr(item, "arguments", None)) for item in final.output] == [
        (item.type, getattr(item, "arguments", None)) for item in whole.output
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert final.usage == whole.usage or final.usage.input_tokens_details != whole.usage.input_tokens_details


UNKNOWN_TO_RESPONSES = ("presence_penalty", "frequency_penalty", "logit_bias", "stop")


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"modalities": ["audio"]}, openai.BadRequestError, "modalities"),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
        ({"n": 129}, openai.BadRequestError, "n"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         openai.BadRequestError, "messages.0.content"),
    ],
)  # fmt: skip
def test_refusals_are_typed_exceptions(strict: openai.OpenAI, fields: dict[str, Any], kind: Any, param: str) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            strict.chat.completions.create(**{"model": MODEL, "messages": TURNS, "stream": stream} | fields)
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"


def test_the_matrix_is_large() -> None:
    assert 2 * sum(len(cases(extras)) for extras in (CHAT_EXTRAS, COMPLETION_EXTRAS, RESPONSE_EXTRAS)) >= 150

"""Every field of every endpoint, of OpenAI's API and of vLLM's is served, or refused by name, by each of ours; what
nobody knows is told of, at any depth.
"""

from __future__ import annotations

import json
import re
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from ostinato.engines.errors import RequestError
from ostinato.runtime.wire import WireModel
from ostinato.runtime.wire_chat import ChatBody
from ostinato.runtime.wire_completions import CompletionBody
from ostinato.runtime.wire_parse import parse_body
from ostinato.runtime.wire_responses import ResponseBody
from ostinato.runtime.wire_tokens import DetokenizeBody, TokenizeBody
from ostinato.runtime.wire_unserved import UNSERVED

USER = {"role": "user", "content": "x"}
NEEDED: dict[type[WireModel], dict[str, Any]] = {
    CompletionBody: {"model": "toy", "prompt": "x"},
    ChatBody: {"model": "toy", "messages": [USER]},
    ResponseBody: {"model": "toy", "input": "x"},
    TokenizeBody: {"prompt": "x"},
    DetokenizeBody: {"tokens": [1]},
}
GENERATING = (CompletionBody, ChatBody, ResponseBody)
OPENAI = (
    completion_create_params.CompletionCreateParamsBase,
    chat_create_params.CompletionCreateParamsBase,
    response_create_params.ResponseCreateParamsBase,
)
_VLLM = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt chat_template
    chat_template_kwargs continue_final_message documents echo ec_transfer_params enable_response_messages
    guided_choice guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos
    include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logits_processors logprob_token_ids
    media_io_kwargs min_p min_tokens mm_payload mm_processor_kwargs previous_input_messages priority prompt_embeds
    prompt_logprobs repetition_detection repetition_penalty request_id return_mm_kwargs return_prompt_text
    return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id
    skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structural_tag structured_outputs
    thinking_token_budget top_k trace_decode_token_ids truncate_prompt_tokens truncation_side use_beam_search vllm_xargs
    watermarking
"""
OURS = {name for kind in GENERATING for name in kind.model_fields}
ALL = sorted({*OURS, *_VLLM.split(), *(name for params in OPENAI for name in get_type_hints(params))} - {"stream"})


def parsed(kind: type[WireModel], ignored: list[str] | None = None, **fields: Any) -> Any:
    return parse_body(kind, json.dumps(NEEDED[kind] | fields).encode(), ignored)


def refused(kind: type[WireModel], ignored: list[str] | None = None, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parsed(kind, ignored, **fields)
    return caught.value


@pytest.mark.parametrize("kind", GENERATING)
def test_every_field_that_somebody_knows_is_served_or_refused_by_name(kind: type[WireModel]) -> None:
    assert len(ALL) > 110
    for name in ALL:
        if name in kind.model_fields:
            continue
        error = refused(kind, [], **{name: {"some": "wish"}})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        advice = str(error).partition(": ")[2].removeprefix("send ")
        field = re.split(r"\W", advice)[0]
        assert advice in ("leave it out", UNSERVED[name].elsewhere) or field in kind.model_fields
        for nothing in (None, *UNSERVED[name].neutral):
            ignored: list[str] = []
            assert parsed(kind, ignored, **{name: nothing}) == parsed(kind)
            assert ignored == []


@pytest.mark.parametrize("kind", [TokenizeBody, DetokenizeBody])
def test_what_would_change_a_count_of_tokens_is_refused(kind: type[WireModel]) -> None:
    for name in ("tools", "chat_template", "chat_template_kwargs", "documents", "continue_final_message", "input"):
        assert refused(kind, [], **{name: "x"}).param == name


def test_the_table_has_no_name_that_nobody_knows() -> None:
    others = {name for kind in NEEDED for name in kind.model_fields}
    assert set(UNSERVED) <= {*ALL, *others}


@pytest.mark.parametrize(
    ("kind", "name", "advice"),
    [
        (ResponseBody, "max_tokens", "max_output_tokens"), (ResponseBody, "max_completion_tokens", "max_output_tokens"),
        (CompletionBody, "max_completion_tokens", "max_tokens"), (ChatBody, "max_output_tokens", "max_completion_tok"),
        (ResponseBody, "response_format", "text.format"), (ResponseBody, "structured_outputs", "text.format"),
        (ChatBody, "guided_regex", "structured_outputs.regex"), (ResponseBody, "guided_json", "text.format"),
        (ResponseBody, "guided_regex", "structured_outputs to /v1/chat/completions"),
        (ResponseBody, "logprobs", "include"), (CompletionBody, "top_logprobs", "logprobs"),
        (CompletionBody, "messages", "prompt"), (ResponseBody, "messages", "input"), (ChatBody, "prompt", "messages"),
        (ChatBody, "request_id", "the header x-request-id"), (ChatBody, "functions", "tools"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_send_instead(kind: type[WireModel], name: str, advice: str) -> None:
    assert f"{name} is not supported here: send {advice}" in str(refused(kind, None, **{name: 5}))


def test_what_asks_for_nothing_is_of_its_own_type() -> None:
    assert refused(ChatBody, store=0).param == "store"  # 0 is no false
    assert refused(ResponseBody, n=True).param == "n"
    assert refused(ChatBody, verbosity="low").param == "verbosity"


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"name": "a", "schema": {}}
NESTED: list[tuple[type[WireModel], str, dict[str, Any]]] = [
    (ChatBody, "messages.0.@", {"messages": [USER | {"@": 1}]}),
    (ChatBody, "messages.1.@", {"messages": [USER, {"role": "assistant", "content": "y", "@": "q"}, USER]}),
    (ChatBody, "messages.0.content.0.@", {"messages": [USER | {"content": [{"type": "text", "text": "x", "@": 1}]}]}),
    (ChatBody, "messages.0.tool_calls.0.@", {"messages": [{"role": "assistant", "tool_calls": [CALL | {"@": {}}]}]}),
    (ChatBody, "tools.0.function.@", {"tools": [{"type": "function", "function": {"name": "f", "@": 1}}]}),
    (ChatBody, "stream_options.@", {"stream": True, "stream_options": {"@": True}}),
    (ChatBody, "response_format.json_schema.@", {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}),
    (CompletionBody, "structured_outputs.@", {"structured_outputs": {"regex": "a", "@": 1}}),
    (ResponseBody, "input.0.@", {"input": [USER | {"@": 1}]}),
    (ResponseBody, "input.0.@", {"input": [{"type": "function_call_output", "call_id": "1", "output": "x", "@": 1}]}),
    (ResponseBody, "text.format.@", {"text": {"format": {"type": "text", "@": 1}}}),
    (ResponseBody, "tools.0.@", {"tools": [{"type": "function", "name": "f", "@": 1}]}),
    (TokenizeBody, "messages.0.@", {"prompt": None, "messages": [USER | {"@": 1}]}),
]


def named(fields: Any, name: str) -> Any:
    """`fields` where the field @ has another name, or none."""
    if isinstance(fields, list):
        return [named(item, name) for item in fields]
    if not isinstance(fields, dict):
        return fields
    return {(name if key == "@" else key): named(value, name) for key, value in fields.items() if key != "@" or name}


@pytest.mark.parametrize(("kind", "path", "fields"), NESTED)
def test_what_nobody_knows_inside_a_field_is_left_out_and_told_of(
    kind: type[WireModel], path: str, fields: dict[str, Any]
) -> None:
    if path.startswith("response_format"):
        fields = {"response_format": {"type": "json_schema", "json_schema": SCHEMA | {"@": 1}}}
    ignored: list[str] = []
    assert parsed(kind, ignored, **named(fields, "unheard_of")) == parsed(kind, **named(fields, ""))
    assert ignored == [path.replace("@", "unheard_of")]
    error = refused(kind, **named(fields, "unheard_of"))
    assert (error.param, error.code) == (ignored[0], "unknown_parameter")
    long: list[str] = []
    parsed(kind, long, **named(fields, "kind:" + "x" * 9000))
    assert len(long[0]) < 200
    assert "kind:xxx" in long[0]


def test_every_one_of_many_is_told_of_and_other_faults_are_still_refused() -> None:
    turns = [USER | {"reasoning_content": "q"}] * 300
    ignored: list[str] = []
    assert parsed(ChatBody, ignored, messages=turns, other=1) == parsed(ChatBody, messages=[USER] * 300)
    assert ignored == ["other", *(f"messages.{at}.reasoning_content" for at in range(300))]
    error = refused(ChatBody, [], messages=turns, temperature="hot")
    assert (error.param, error.code) == ("temperature", "invalid_type")
    assert refused(ChatBody, [], messages=[*turns, {"role": "user"}]).param == "messages.300"


def test_floods_of_fields_are_refused_at_once() -> None:
    flood = {f"k{number}": 1 for number in range(300_000)}
    for fields in (flood, {"stream_options": flood}, {"messages": [USER | flood]}):
        assert "at most 256 are allowed" in str(refused(ChatBody, [], **fields))  # and no fault for each
    several = dict(list(flood.items())[:200])
    error = refused(ChatBody, [], messages=[USER | several] * 60)
    assert "more than 10000 fields are unknown" in str(error)


@pytest.mark.parametrize(
    ("kind", "path", "fields"),
    [
        (ChatBody, "messages.0.content", {"messages": [USER | {"content": [{"type": "image_url", "image_url": {}}]}]}),
        (ChatBody, "messages.0.audio", {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}),
        (ChatBody, "messages.0.function_call", {"messages": [USER | {"function_call": {"name": "f"}}]}),
        (ChatBody, "messages.0.content.0.image_url",
         {"messages": [USER | {"content": [{"type": "text", "text": "x", "image_url": "http://x"}]}]}),
        (ChatBody, "response_format.schema", {"response_format": {"type": "json_object", "schema": {}}}),
        (ChatBody, "chat_template_kwargs.thinking", {"chat_template_kwargs": {"thinking": True}}),
        (ChatBody, "structured_outputs.whitespace_pattern",
         {"structured_outputs": {"json": {}, "whitespace_pattern": "x"}}),
        (ChatBody, "stream_options.continuous_usage_stats",
         {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
        (ResponseBody, "input.0.tool_calls", {"input": [USER | {"tool_calls": [CALL]}]}),
        (ResponseBody, "input.0.content.0.type", {"input": [USER | {"content": [{"type": "input_image"}]}]}),
        (ResponseBody, "stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": True}}),
        (ResponseBody, "text.format.json_schema", {"text": {"format": {"type": "json_object", "json_schema": {}}}}),
        (ResponseBody, "tools.0.output_schema", {"tools": [{"type": "function", "name": "f", "output_schema": {}}]}),
    ],
)  # fmt: skip
def test_what_is_known_and_not_served_inside_a_field_is_still_refused(
    kind: type[WireModel], path: str, fields: dict[str, Any]
) -> None:
    lists: tuple[list[str] | None, ...] = ([], None)
    for ignored in lists:
        assert refused(kind, ignored, **fields).param == path


def test_inside_a_field_too_what_asks_for_nothing_passes() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}}
    for kind in (ChatBody, CompletionBody):
        assert parsed(kind, None, **options).stream_options.include_usage is True


@pytest.mark.parametrize("number", [2**64, 2**70, -(2**64), 10**30])
def test_integers_that_json_readers_take_for_floats_are_told_the_range(number: int) -> None:
    for kind in GENERATING:
        assert f"give an integer from {-(2**63)} to {2**64 - 1}" in str(refused(kind, seed=number, top_k=None))
        assert f"give an integer from {-(2**63)} to {2**64 - 1}" in str(refused(kind, top_k=number))
    assert "max_tokens: out of range: give an integer from 0 to" in str(refused(ChatBody, max_tokens=number))
    assert "valid integer" in str(refused(ChatBody, seed=1.5))

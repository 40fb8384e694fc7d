"""Functions in /v1/responses through OpenAI's own client: calls come out as items, and go back in with results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from ostinato.engines.errors import DeviceError
from ostinato.runtime.tool_style import LLAMA3
from tests.fakes import PosLM
from tests.http_calls import error_of
from tests.serving import MODEL, PATIENCE_SECONDS, VOCAB_SIZE, FaultyLM, Running, serving

from .test_tools_served import ARGUMENTS, FIT, LIMITS, STYLES, SayLM

TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "<é>", "parameters": FIT},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ADDED, DONE = "response.output_item.added", "response.output_item.done"


class Speaker:
    """A server in a style, and what its model says next."""

    def __init__(self, server: Running, model: SayLM, client: openai.OpenAI, style: str) -> None:
        self.server, self.model, self.client = server, model, client
        self.style = STYLES[style][1]

    def say(self, said: str, **fields: Any) -> Any:
        """The answer, the same whole and as a stream."""
        options = {"model": MODEL, "input": "hi", "tools": TOOLS, "temperature": 0, "max_output_tokens": 400} | fields
        answers = []
        for stream in (False, True):
            self.server.await_idle()
            self.model.say(said)
            answers.append(self.stream(**options) if stream else self.client.responses.create(**options))
        whole, streamed = answers
        assert streamed.status == whole.status
        assert [without_ids(item) for item in streamed.output] == [without_ids(item) for item in whole.output]
        return whole

    def stream(self, **options: Any) -> Any:
        """What the events come to, each rule of theirs checked. The client's own accumulator agrees."""
        events = list(self.client.responses.create(**options, stream=True))
        items: list[Any] = []
        text = ""
        for number, event in enumerate(events):
            EVENTS.validate_python(event.model_dump(by_alias=True))
            assert event.sequence_number == number
            if hasattr(event, "output_index"):
                assert event.output_index == len(items) - (event.type != ADDED)
            match event.type:
                case "response.output_item.added":
                    assert event.item.status == "in_progress"
                    items.append(event.item)
                    text = ""
                case "response.output_text.delta" | "response.function_call_arguments.delta":
                    assert event.delta
                    text += event.delta
                case "response.output_text.done":
                    assert event.text == text
                case "response.function_call_arguments.done":
                    assert event.arguments == text
                case "response.output_item.done":
                    assert event.item.id == items[-1].id
                    items[-1] = event.item
            if hasattr(event, "item_id"):
                assert event.item_id == items[-1].id
        assert events[-1].type == f"response.{events[-1].response.status}"
        assert events[-1].response.output == items
        return events[-1].response


def without_ids(item: Any) -> dict[str, Any]:
    """Two answers are two requests: their items have other ids."""
    table: dict[str, Any] = item.model_dump()
    assert table["id"].startswith("fc_" if table["type"] == "function_call" else "msg_")
    return table | {"id": None, "call_id": None}


@pytest.fixture(scope="module", params=STYLES)
def speaker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    model = SayLM()
    folder, template = tmp_path_factory.mktemp("toy"), STYLES[request.param][0]
    with (
        serving(folder, LIMITS, model, chat_template=template) as server,
        openai.OpenAI(
            base_url=server.url + "/v1",
            api_key="none",
            max_retries=0,
            timeout=PATIENCE_SECONDS,
            _strict_response_validation=True,
        ) as client,
    ):
        yield Speaker(server, model, client, request.param)
        server.await_idle()


def test_calls_come_out_as_items(speaker: Speaker) -> None:
    style = speaker.style
    is_marked = bool(style.begin)
    said = style.joint.join([style.call("weather", ARGUMENTS), style.call("now", "{}")])
    answer = speaker.say(f"One moment.\n{said}\nSo." if is_marked else said)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(call.name, call.arguments, call.status) for call in calls] == [
        ("weather", ARGUMENTS, "completed"), ("now", "{}", "completed"),
    ][: len(calls)]  # fmt: skip
    assert len(calls) == (1 if style is LLAMA3 else 2)
    assert len({call.call_id for call in calls}) == len(calls)
    assert answer.status == "completed"
    texts = [item.content[0].text for item in answer.output if item.type == "message"]
    assert texts == (["One moment.", "So."] if is_marked else [])
    if is_marked:
        assert [item.type for item in answer.output] == ["message", "function_call", "function_call", "message"]
    assert [tool.name for tool in answer.tools] == ["weather", "now"]
    assert (answer.tool_choice, answer.parallel_tool_calls) == ("auto", True)


def test_text_is_a_message_as_without_tools(speaker: Speaker) -> None:
    others: list[dict[str, Any]] = [{}, {"tool_choice": "none"}, {"tools": []}]
    for fields in others:
        (item,) = speaker.say(" Hello\n ", **fields).output
        assert (item.type, item.content[0].text) == ("message", " Hello\n ")
    (item,) = speaker.say("").output
    assert (item.type, item.content[0].text, item.status) == ("message", "", "completed")
    call = speaker.style.call("now", "{}")
    assert speaker.say(call, tool_choice="none").output_text == call


def test_a_call_that_is_cut_short_is_incomplete(speaker: Speaker) -> None:
    call = speaker.style.call("weather", ARGUMENTS)
    answer = speaker.say(call, max_output_tokens=call.index(ARGUMENTS) + 5)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [(item.arguments, item.status) for item in answer.output] == [(ARGUMENTS[:5], "incomplete")]
    answer = speaker.say(call, extra_body={"stop": ["days"]})
    assert answer.status == "completed"
    assert answer.output[0].status == "incomplete", "nobody can make this call"


def test_a_conversation_goes_on_with_results(speaker: Speaker) -> None:
    first = speaker.say(speaker.style.call("weather", ARGUMENTS))
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turns = [{"role": "user", "content": "hi"}, *first.output, result]
    second = speaker.say("It is sunny.", input=turns)
    assert second.output_text == "It is sunny."
    assert second.usage.input_tokens > first.usage.input_tokens
    dumped = [{"role": "user", "content": "hi"}, call.model_dump(), result]
    assert speaker.say("Sunny.", input=dumped).usage.input_tokens == second.usage.input_tokens


def test_a_conversation_costs_what_it_does_in_a_chat(speaker: Speaker) -> None:
    """The template gets the same turns and tools."""
    call = {"call_id": "c1", "name": "weather", "arguments": ARGUMENTS}
    result = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    items = [{"role": "user", "content": "hi"}, {"type": "function_call", **call}, result]
    function = {"name": "weather", "arguments": ARGUMENTS}
    messages: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    nested: Any = [
        {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}} for tool in TOOLS
    ]
    chat = speaker.client.chat.completions.create(model=MODEL, messages=messages, tools=nested, max_tokens=1)
    assert chat.usage is not None
    assert speaker.say("x", input=items).usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_forced_and_strict_calls_fit_their_schemas(speaker: Speaker, choice: Any) -> None:
    nonsense = speaker.style.call("weather", '{"unit": 5, "nonsense')
    strict = [TOOLS[0] | {"strict": True}, TOOLS[1]]
    for fields in ({"tool_choice": choice}, {"tools": strict}):
        answer = speaker.say(nonsense, **fields)
        (item,) = answer.output
        assert (item.name, item.status) == ("weather", "completed")
        jsonschema.validate(json.loads(item.arguments), FIT)
    answer = speaker.say(nonsense, tool_choice=choice, parallel_tool_calls=False)
    echoed = answer.tool_choice if isinstance(choice, str) else answer.tool_choice.model_dump()
    assert (echoed, answer.parallel_tool_calls) == (choice, False)


def test_the_clients_helpers_understand_the_events(speaker: Speaker) -> None:
    speaker.server.await_idle()
    speaker.model.say(speaker.style.call("weather", ARGUMENTS))
    with speaker.client.responses.stream(model=MODEL, input="hi", tools=TOOLS, temperature=0) as stream:
        seen = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert seen[-1] == ARGUMENTS
    assert final.output[0].arguments == ARGUMENTS  # type: ignore[union-attr]


def test_refusals_name_fields_of_this_body(speaker: Speaker) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "base64"}}}
    body: dict[str, Any] = {"model": MODEL, "input": "x", "tools": [TOOLS[1], TOOLS[0] | {"parameters": bad}]}
    form = {"text": {"format": {"type": "json_object"}}}
    with speaker.server.client() as http:
        for fields, param in (
            ({"tool_choice": "required"}, "tools.1.parameters"), ({"tools": [TOOLS[1]] * 2}, "tools.1.name"),
            ({"tools": TOOLS, **form}, "text.format"),
            ({"tools": TOOLS, "include": ["message.output_text.logprobs"]}, "include"),
        ):  # fmt: skip
            assert error_of(http.post("/v1/responses", json=body | fields), 400)["param"] == param
        answer = http.post("/v1/responses", json=body | form | {"tool_choice": "none", "max_output_tokens": 1})
        assert answer.status_code == 200, answer.text


def test_a_failing_step_keeps_the_items_that_came(tmp_path_factory: pytest.TempPathFactory) -> None:
    faulty = FaultyLM(PosLM(LIMITS, VOCAB_SIZE), DeviceError("the device refused"))
    faulty.is_bad = True
    with serving(tmp_path_factory.mktemp("toy"), LIMITS, faulty) as server, server.client() as http:
        body = {"model": MODEL, "input": "x", "tools": TOOLS, "stream": True}
        blocks = http.post("/v1/responses", json=body).text.split("\n\n")[:-1]
        last = json.loads(blocks[-1].split("data: ")[1])
        assert [block.split("\n")[0] for block in blocks] == [
            "event: response.created", "event: response.in_progress", "event: response.failed",
        ]  # fmt: skip
        assert (last["response"]["output"], last["response"]["error"]["message"]) == ([], "the device refused")

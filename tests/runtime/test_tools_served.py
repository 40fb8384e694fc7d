"""Tools through OpenAI's own client, in each style: what the model writes as calls comes out as calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from ostinato.runtime.batch import Batch
from ostinato.runtime.tool_style import HERMES, LLAMA3, TOLD, ToolStyle
from tests.chat_templates import HERMES_TEMPLATE, LLAMA_TEMPLATE
from tests.fakes import Done, PosLM, make_limits
from tests.http_calls import error_of
from tests.scale import scaled
from tests.serving import CHAT_TEMPLATE, MODEL, PATIENCE_SECONDS, VOCAB_SIZE, Running, TapeLM, serving

LIMITS = make_limits(max_rows=4, max_step_tokens=256, max_context=4096, num_blocks=1024)
STYLES: dict[str, tuple[str, ToolStyle]] = {
    "hermes": (HERMES_TEMPLATE, HERMES), "llama3": (LLAMA_TEMPLATE, LLAMA3), "told": (CHAT_TEMPLATE, TOLD),
}  # fmt: skip
FIT = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["°C", "°F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
        "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["unit", "days", "tags"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "<é>", "parameters": FIT}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": FIT, "now": {"type": "object", "additionalProperties": False}}
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
ARGUMENTS = '{"unit": "\\u00b0C",  "days": 3, "tags": ["}", "é\\""]}'


class SayLM(TapeLM):
    """Says what it was last told to say, whatever the prompt."""

    def __init__(self) -> None:
        super().__init__(b"", 0)

    def say(self, text: str) -> None:
        self._tape, self._start = text.encode(), -1

    def run(self, batch: Batch) -> Done:
        if self._start < 0 and batch.num_sampled:
            self._start = int(batch.positions[batch.logits_indices[0]])
        return super().run(batch)


class Speaker:
    """A server in a style, its client, and what its model says next."""

    def __init__(self, server: Running, model: SayLM, style: ToolStyle) -> None:
        self.client = client_of(server)
        self.style = style
        self.server = server
        self.model = model
        self.takes_many = style is not LLAMA3  # its template refuses two calls in a turn
        self.create: Any = self.client.chat.completions.create

    def say(self, said: str) -> None:
        """A row that a stop string cut short may be in a step yet: it must not be the one that says this."""
        self.server.await_idle()
        self.model.say(said)

    def ask(self, said: str, **fields: Any) -> dict[str, Any]:
        """The answer, the same whole and as a stream."""
        fields = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 400} | fields
        self.say(said)
        whole: dict[str, Any] = self.create(**fields).model_dump()
        self.say(said)
        stream = self.create(**fields, stream=True, stream_options={"include_usage": True})
        together = gathered([chunk.model_dump() for chunk in stream], len(whole["choices"]))
        self.server.await_idle()
        assert together["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}
        for mine, other in zip(together["choices"], whole["choices"], strict=True):
            assert without_ids(mine) == without_ids({name: other[name] for name in mine})
        return whole


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """The two answers are two requests: their calls have other ids."""
    message = choice["message"]
    calls = [(call["type"], call["function"]) for call in message.get("tool_calls") or []]
    content = message["content"] or None
    return choice | {"message": {"role": message["role"], "content": content, "tool_calls": calls}}


def gathered(chunks: list[dict[str, Any]], num_choices: int) -> dict[str, Any]:
    """What a client keeps of a stream, with every rule of its chunks checked."""
    assert chunks[-1]["choices"] == []
    choices = []
    for index in range(num_choices):
        mine = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        first, last = mine[0], mine[-1]
        assert first["delta"]["role"] == "assistant"
        assert not first["delta"]["content"]
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
        for part in mine[1:-1]:
            delta = part["delta"]
            assert part["finish_reason"] is None
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            for call in delta.get("tool_calls") or []:
                keep(message["tool_calls"], call)
        assert last["delta"].get("content") is None
        entries = [entry for part in mine if part["logprobs"] for entry in part["logprobs"]["content"]]
        logprobs = {"content": entries, "refusal": None} if entries else None
        choices.append({"message": message, "finish_reason": last["finish_reason"], "logprobs": logprobs})
    return {"choices": choices, "usage": chunks[-1]["usage"]}


def keep(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    if part["id"] is not None:
        assert part["index"] == len(calls)
        assert part["function"]["arguments"] == ""
        calls.append({"id": part["id"], "type": part["type"], "function": part["function"]})
    else:
        assert part["index"] == len(calls) - 1
        assert part["function"].get("name") is None
        assert part["function"]["arguments"]
        calls[-1]["function"]["arguments"] += part["function"]["arguments"]


@pytest.fixture(scope="module", params=STYLES)
def speaker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    template, style = STYLES[request.param]
    model = SayLM()
    with serving(tmp_path_factory.mktemp("toy"), LIMITS, model, chat_template=template) as server:
        speaker = Speaker(server, model, style)
        with speaker.client:
            yield speaker
        server.await_idle()


@pytest.fixture(scope="module", params=STYLES)
def random_client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("toy")
    executor = PosLM(LIMITS, VOCAB_SIZE)
    with (
        serving(folder, LIMITS, executor, chat_template=STYLES[request.param][0]) as server,
        client_of(server) as client,
    ):
        yield client
        server.await_idle()


def test_calls_come_out_as_written_whole_and_streamed(speaker: Speaker) -> None:
    style = speaker.style
    text = "One moment.\n" if style.begin else ""
    said = text + style.joint.join([style.call("weather", ARGUMENTS), style.call("now", "{}")])
    answer = speaker.ask(said, n=2, seed=1)
    assert len(answer["choices"]) == 2
    ids = set()
    for choice in answer["choices"]:
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["content"] == ("One moment." if text else None)
        functions = [{"name": "weather", "arguments": ARGUMENTS}, {"name": "now", "arguments": "{}"}]
        assert [call["function"] for call in message["tool_calls"]] == functions[: 2 if speaker.takes_many else 1]
        ids |= {call["id"] for call in message["tool_calls"]}
    assert len(ids) == (4 if speaker.takes_many else 2)
    assert all(call_id.startswith("call_") for call_id in ids)


def test_at_most_one_call_where_parallel_ones_are_not_wanted(speaker: Speaker) -> None:
    said = speaker.style.joint.join([speaker.style.call("now", "{}")] * 2)
    message = speaker.ask(said, parallel_tool_calls=False)["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]


@pytest.mark.parametrize("name", ["rm", "now"])
def test_what_is_no_call_is_content(speaker: Speaker, name: str) -> None:
    said = speaker.style.call(name, "{}" if name == "rm" else "[]") + " - so there"
    choice = speaker.ask(said)["choices"][0]
    assert choice["message"]["content"] == said
    assert not choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "stop"


def test_plain_text_and_none(speaker: Speaker) -> None:
    assert speaker.ask("  Hello\n ")["choices"][0]["message"]["content"] == "  Hello\n "
    said = speaker.style.call("now", "{}")
    fields: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 400}
    answers = []
    for tools in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        speaker.model.say(said)
        answers.append(speaker.create(**fields, **tools))
    assert [answer.choices[0].message.content for answer in answers] == [said, said]
    # Without a call to make, the model is not told of any.
    usages = [answer.usage.prompt_tokens for answer in answers if answer.usage]
    assert usages == [usages[0]] * 2


def test_a_cut_call_is_told_as_far_as_it_came(speaker: Speaker) -> None:
    call = speaker.style.call("weather", ARGUMENTS)
    cut = call.index(ARGUMENTS) + 5
    choice = speaker.ask(call, max_tokens=cut)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS[:5]}
    choice = speaker.ask(call, stop=["days"])["choices"][0]
    whole = ARGUMENTS[: ARGUMENTS.index("days")]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": whole}
    assert choice["finish_reason"] == "stop", "nobody can make this call"
    choice = speaker.ask(call, max_tokens=12)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", call[:12])


def test_logprobs_cover_every_token(speaker: Speaker) -> None:
    said = speaker.style.call("weather", ARGUMENTS)
    answer = speaker.ask(said, logprobs=True, top_logprobs=1)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]) == said.encode()


def test_a_conversation_goes_on_with_results(speaker: Speaker) -> None:
    said = speaker.style.call("weather", ARGUMENTS)
    first = speaker.ask(said)
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    second = speaker.ask("It is sunny.", messages=[*MESSAGES, message, result])
    assert second["choices"][0]["message"]["content"] == "It is sunny."
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
    without = speaker.ask("Sunny.", messages=[*MESSAGES, message, result], tool_choice="none", tools=TOOLS)
    assert without["choices"][0]["message"]["content"] == "Sunny."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_fit_their_schemas_whatever_the_model_would_say(random_client: openai.OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300}
    create: Any = random_client.chat.completions.create
    num_done = 0
    for seed in range(scaled(4, 100)):
        answer = create(model=MODEL, **fields, n=2, seed=seed, parallel_tool_calls=bool(seed % 2))
        for one in answer.choices:
            assert one.message.content is None
            calls: list[Any] = one.message.tool_calls or []
            if one.finish_reason == "length":
                continue
            num_done += 1
            assert one.finish_reason == ("tool_calls" if choice == "required" else "stop")
            assert calls
            if not seed % 2 or choice != "required":
                assert len(calls) == 1
            for call in calls:
                assert choice == "required" or call.function.name == "weather"
                jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert num_done


def test_a_strict_function_is_kept_to_its_schema_where_it_is_called(speaker: Speaker) -> None:
    """The model begins a call and then goes on with what no schema allows: it is turned to what one does."""
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    call = speaker.style.call("weather", '{"unit": 5, "nonsense')
    choice = speaker.ask(call, tools=strict)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    function = choice["message"]["tool_calls"][0]["function"]
    assert function["name"] == "weather"
    jsonschema.validate(json.loads(function["arguments"]), FIT)
    free = "Just text, no call."
    assert speaker.ask(free, tools=strict)["choices"][0]["message"]["content"] == free
    loose = speaker.style.call("weather", '{"unit": 5}')
    message = speaker.ask(loose)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"unit": 5}'


def test_schemas_that_can_not_be_kept_are_refused_by_name_only_where_they_must_be(speaker: Speaker) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "base64"}}}
    tools = [TOOLS[1], {"type": "function", "function": {"name": "bad", "parameters": bad}}]
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": tools, "max_tokens": 3}
    with speaker.server.client() as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        error = error_of(http.post("/v1/chat/completions", json=body | {"tool_choice": "required"}), 400)
        assert (error["param"], error["code"]) == ("tools.1.function.parameters", "unsupported_schema")
        named = {"type": "function", "function": {"name": "now"}}
        assert http.post("/v1/chat/completions", json=body | {"tool_choice": named}).status_code == 200


def test_tools_and_a_form_of_the_whole_answer_contradict_each_other(speaker: Speaker) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 3}
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}}, {"structured_outputs": {"choice": ["a", "b"]}},
    ]  # fmt: skip
    with speaker.server.client() as http:
        for form in forms:
            for choice in ("auto", "required"):
                response = http.post("/v1/chat/completions", json=body | form | {"tool_choice": choice})
                assert error_of(response, 400)["param"] == next(iter(form))
            answer = http.post("/v1/chat/completions", json=body | form | {"tool_choice": "none"})
            assert answer.status_code == 200, answer.text
        text = body | {"response_format": {"type": "text"}}
        assert http.post("/v1/chat/completions", json=text).status_code == 200


def test_what_a_template_refuses_is_a_400_in_its_own_words(speaker: Speaker) -> None:
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "now", "arguments": "{}"}} for n in range(2)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in calls]
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": calls}, *results]
    with speaker.server.client() as http:
        response = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 3})
    if speaker.takes_many:
        assert response.status_code == 200, response.text
        return
    error = error_of(response, 400)
    assert (error["param"], error["code"]) == ("messages", "chat_template_error")
    assert "one tool call at once" in error["message"]

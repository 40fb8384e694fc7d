"""Structured output over HTTP: both endpoints, each field, refusals by name, and what others notice of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato.runtime import grammar_guide
from ostinato.runtime.grammar_guide import GrammarGuide
from ostinato.runtime.grammar_source import Source
from ostinato.runtime.grammar_trial import Trial, Tried
from ostinato.runtime.grammars import NUM_WORKERS
from tests.fakes import PosLM
from tests.grammars import PATIENT, LateLM
from tests.http_calls import LIMITS, chat, complete, error_of, payloads
from tests.serving import ANY_PORTS, MODEL, PATIENCE_SECONDS, VOCAB_SIZE, GatedLM, Running, await_true, serving

CONFIG = replace(ANY_PORTS, limits=PATIENT)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    executor = LateLM(LIMITS, VOCAB_SIZE)
    with serving(tmp_path_factory.mktemp("tokenizer"), LIMITS, executor, config=CONFIG) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def _schema_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def test_an_answer_fits_its_schema_streamed_and_not(client: httpx.Client) -> None:
    fields = {"response_format": _schema_format(PERSON), "max_tokens": 100, "seed": 5, "temperature": 1.0}
    answer = chat(client, **fields).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    person = json.loads(choice["message"]["content"])
    assert set(person) == {"name", "age"}
    assert len(person["name"]) <= 4
    assert 0 <= person["age"] <= 9
    assert answer["usage"]["completion_tokens"] == len(choice["message"]["content"].encode()) + 1  # bytes, and the end
    events = payloads(chat(client, **fields, stream=True))
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == choice["message"]["content"]


@pytest.mark.parametrize(
    ("structured", "texts"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[ab]{3}"}, {a + b + c for a in "ab" for b in "ab" for c in "ab"}),
        ({"grammar": 'start: "x" | "(y)"'}, {"x", "(y)"}),
        ({"grammar": 'root ::= "x" | "(y)"'}, {"x", "(y)"}),
        ({"json": {"enum": [1, "a"]}}, {"1", '"a"'}),
        ({"json": '{"const": [true]}'}, {"[true]"}),
    ],
)
def test_each_kind_of_structured_output_is_kept_in_both_endpoints(
    client: httpx.Client, structured: dict[str, Any], texts: set[str]
) -> None:
    for seed in range(3):
        fields = {"structured_outputs": structured, "max_tokens": 40, "seed": seed}
        assert chat(client, **fields).json()["choices"][0]["message"]["content"] in texts
        completion = complete(client, **fields, n=2).json()
        assert {choice["text"] for choice in completion["choices"]} <= texts
        assert {choice["finish_reason"] for choice in completion["choices"]} == {"stop"}


def test_any_object_is_an_object(client: httpx.Client) -> None:
    bias = {str(ord(mark)): 20.0 for mark in '"}:0'}
    for field in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        answer = chat(client, **field, max_tokens=100, logit_bias=bias).json()["choices"][0]
        assert answer["finish_reason"] == "stop"
        assert isinstance(json.loads(answer["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": _schema_format({"type": "strnig"})}, "response_format"),
        ({"response_format": _schema_format({"pattern": "("})}, "response_format"),
        ({"response_format": _schema_format({"uniqueItems": True})}, "response_format"),
        ({"response_format": _schema_format(False)}, "response_format"),
        ({"response_format": _schema_format([])}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a{1000000}"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "backend": "x"}}, "structured_outputs.backend"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
    ],
)
def test_what_can_not_be_kept_is_refused_by_name(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    for ask in (chat, complete):
        assert error_of(ask(client, **fields), 400)["param"] == param


def test_a_text_format_asks_for_nothing(client: httpx.Client) -> None:
    plain = complete(client, max_tokens=5, seed=1).json()["choices"]
    assert complete(client, max_tokens=5, seed=1, response_format={"type": "text"}).json()["choices"] == plain


def test_with_logprobs_each_token_is_sampled_and_the_text_is_the_same(client: httpx.Client) -> None:
    fields = {"response_format": _schema_format(PERSON), "max_tokens": 100, "seed": 3}
    plain = chat(client, **fields).json()["choices"][0]
    scored = chat(client, **fields, logprobs=True, top_logprobs=1).json()["choices"][0]
    assert scored["message"] == plain["message"]
    text = b"".join(bytes(token["bytes"]) for token in scored["logprobs"]["content"])
    assert text.decode().startswith(plain["message"]["content"])


def test_tools_and_a_form_of_the_answer_contradict_each_other(client: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    error = error_of(chat(client, tools=tools, response_format={"type": "json_object"}), 400)
    assert error["param"] == "response_format"


def test_a_guide_that_fails_ends_its_request_alone(
    server: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = GrammarGuide.accept

    def fail(guide: GrammarGuide, token_id: int) -> None:
        if token_id == ord("!"):
            raise ValueError("injected")
        accept(guide, token_id)

    monkeypatch.setattr(GrammarGuide, "accept", fail)
    error = error_of(complete(client, structured_outputs={"regex": "ab[!]cd"}, max_tokens=20), 500)
    assert "injected" not in error["message"]
    assert complete(client, structured_outputs={"regex": "abcd"}, max_tokens=20).json()["choices"][0]["text"] == "abcd"
    server.await_idle()


def test_others_go_on_while_a_grammar_is_tried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial ends only when a stream beside it has moved on."""
    has_moved = threading.Event()
    run = Trial.run

    def slow(trial: Trial, source: Source, seconds: float) -> Tried:
        assert has_moved.wait(PATIENCE_SECONDS), "the stream stood still"
        return run(trial, source, seconds)

    monkeypatch.setattr(Trial, "run", slow)
    gated = GatedLM(PosLM(LIMITS, VOCAB_SIZE))
    bomb = {"type": "integer", "multipleOf": 999_983}
    answers: list[httpx.Response] = []
    with serving(tmp_path, LIMITS, gated, config=ANY_PORTS) as running, running.client() as client:
        running.bridge.grammars.warm()  # a start would take a part of the bomb's time

        def throw() -> None:
            with running.client() as own:
                answers.append(chat(own, response_format=_schema_format(bomb)))

        body = {"model": MODEL, "prompt": "x", "max_tokens": 40, "ignore_eos": True, "seed": 1}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            thrower = threading.Thread(target=throw)
            thrower.start()
            gated.permit(20)
            seen = 0
            while seen < 5:
                seen += next(lines).startswith("data: {")
            assert not answers
            has_moved.set()
            thrower.join()
            gated.permit(100)
            last = [line for line in lines if line.startswith("data: {")][-1]
        usage = json.loads(last.removeprefix("data: "))["usage"]
        assert usage["completion_tokens"] == 40
        assert answers[0].status_code in (400, 429)  # on a machine that leaves a trial no processor, it may come again
        error = error_of(answers[0], answers[0].status_code)
        assert error["code"] in ("unsupported_schema", "grammars_busy")
        running.await_idle()


def test_workers_may_start_before_anybody_asks(tmp_path: Path) -> None:
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE), config=CONFIG) as running, running.client() as client:
        grammars = running.bridge.grammars
        grammars.warm()
        assert grammars.num_idle == NUM_WORKERS
        assert complete(client, structured_outputs={"choice": ["yes"]}, max_tokens=9).status_code == 200
        await_true(lambda: grammars.num_idle == NUM_WORKERS, "the worker did not come back")


@pytest.mark.parametrize(
    ("rules", "slow_seconds", "code"),
    [
        ("start: /[ab]{60}/ A\nA: /x/ & /y/", 1.0, "no_legal_token"),
        ("start: /[a-z]{64}/", -1.0, "grammar_too_costly"),  # where every mask is too slow
    ],
)
def test_a_grammar_that_leads_nowhere_is_its_callers_fault_and_no_trace_in_the_log(
    client: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rules: str,
    slow_seconds: float,
    code: str,
) -> None:
    monkeypatch.setattr(grammar_guide, "SLOW_SECONDS", slow_seconds)
    fields = {"structured_outputs": {"grammar": rules}, "max_tokens": 70, "seed": 1, "temperature": 1.0}
    with caplog.at_level("INFO", "ostinato"):
        refused = error_of(chat(client, **fields), 400)
        event = payloads(chat(client, **fields, stream=True))[-1]["error"]
    assert refused == event
    assert (refused["type"], refused["param"]) == ("invalid_request_error", "structured_outputs")
    assert refused["code"] == code
    lines = [record for record in caplog.records if refused["message"] in record.getMessage()]
    assert lines
    assert all(record.levelname == "INFO" and record.exc_info is None for record in lines)
    assert not any(record.levelno > 20 for record in caplog.records)

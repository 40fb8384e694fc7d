"""The Responses endpoint: its answers, whole and as OpenAI's sequence of events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato.engines.errors import DeviceError
from tests.fakes import PosLM
from tests.http_calls import CHAT_FRAME, LIMITS, chat, error_of
from tests.serving import MODEL, VOCAB_SIZE, FaultyLM, TapeLM, serving

BEGIN = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
DELTA = "response.output_text.delta"


def respond(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/responses", json={"model": MODEL, "input": "x"} | fields)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The payloads; each event's name must be its payload's type, and the numbers must count."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    payloads = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        assert payload["sequence_number"] == number
        payloads.append(payload)
    return payloads


def test_a_whole_answer_is_the_chats(client: httpx.Client) -> None:
    options = {"seed": 4, "ignore_eos": True}
    answer = respond(client, max_output_tokens=10, metadata={"a": "b"}, user="u", **options).json()
    expected = chat(client, max_tokens=10, **options).json()
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert [part["text"] for part in item["content"]] == [expected["choices"][0]["message"]["content"]]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    usage = answer["usage"]
    assert usage["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert (usage["output_tokens"], usage["total_tokens"]) == (10, usage["input_tokens"] + 10)
    assert (answer["metadata"], answer["user"], answer["store"]) == ({"a": "b"}, "u", False)


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_is_the_whole_answer(client: httpx.Client, logprobs: bool) -> None:
    options: dict[str, Any] = {"seed": 3, "max_output_tokens": 20, "instructions": "be brief"}
    if logprobs:
        options |= {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    whole = respond(client, **options).json()
    found = events(respond(client, stream=True, **options))
    kinds = [event["type"] for event in found]
    deltas = [event for event in found if event["type"] == DELTA]
    assert kinds == [*BEGIN, *[DELTA] * len(deltas), *END, f"response.{whole['status']}"]
    (part,) = whole["output"][0]["content"]
    assert "".join(event["delta"] for event in deltas) == part["text"] == found[-4]["text"] == found[-3]["part"]["text"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"] == found[-4]["logprobs"]
    assert bool(part["logprobs"]) is logprobs
    assert all(len(entry["top_logprobs"]) == 3 for entry in part["logprobs"])
    item_id = found[2]["item"]["id"]
    assert {event["item_id"] for event in found if "item_id" in event} == {item_id}
    final = found[-1]["response"]
    assert final["output"][0] == whole["output"][0] | {"id": item_id} == found[-2]["item"]
    named = {"id": None, "created_at": None, "output": None, "usage": None}
    assert final | named == whole | named
    assert final["usage"] | {"input_tokens_details": None} == whole["usage"] | {"input_tokens_details": None}
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["id"] == final["id"]


def test_an_answer_that_ended_by_itself_is_completed(tmp_path: Path) -> None:
    tape = TapeLM("né\u2028e".encode(), CHAT_FRAME)
    with serving(tmp_path, LIMITS, tape) as server, server.client() as client:
        answer = respond(client, temperature=0).json()
        assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
        assert answer["output"][0]["status"] == "completed"
        assert answer["output"][0]["content"][0]["text"] == "né\u2028e"
        found = events(respond(client, temperature=0, stream=True))
        assert "".join(event["delta"] for event in found if event["type"] == DELTA) == "né\u2028e"
        assert found[-1]["type"] == "response.completed"


def test_an_answer_goes_back_in_as_input(client: httpx.Client) -> None:
    first = respond(client, max_output_tokens=3, seed=1).json()
    turns = [{"role": "user", "content": "x"}, *first["output"], {"role": "user", "content": "y"}]
    second = respond(client, input=turns, max_output_tokens=3)
    assert second.status_code == 200, second.text
    assert second.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "context_length_exceeded"),
        ({"input": "y" * 500}, "input", "context_length_exceeded"),
        ({"input": []}, "input", "invalid_value"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "invalid_value"),
    ],
)
def test_refusals_name_the_field_of_this_body(client: httpx.Client, fields: Any, param: str, code: str) -> None:
    for stream in (False, True):
        error = error_of(respond(client, stream=stream, **fields), 400)
        assert (error["param"], error["code"]) == (param, code)
        assert " max_tokens" not in error["message"]
    assert error_of(respond(client, model="other"), 404)["code"] == "model_not_found"


def test_a_failing_step_ends_the_events_with_a_failed_answer(tmp_path: Path) -> None:
    faulty = FaultyLM(PosLM(LIMITS, VOCAB_SIZE), DeviceError("the device refused"))
    faulty.is_bad = True
    with serving(tmp_path, LIMITS, faulty) as server, server.client() as client:
        assert error_of(respond(client), 500)["message"] == "the device refused"
        *begun, last = events(respond(client, stream=True))
        assert [event["type"] for event in begun] == BEGIN
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": "server_error", "message": "the device refused"}

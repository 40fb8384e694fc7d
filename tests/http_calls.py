"""Calls of the two endpoints in tests, and what a refusal and a stream must look like in every one."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.fakes import make_limits
from tests.serving import MODEL

LIMITS = make_limits(max_rows=8, max_step_tokens=64, max_context=128)
CHAT_FRAME = len("user:\nassistant:")  # tokens that the template adds to a one-turn conversation


def complete(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"model": MODEL, "prompt": "x"} | fields)


def chat(client: httpx.Client, content: Any = "x", **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages} | fields)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The one error object of a refusal."""
    assert response.status_code == status, response.text
    return error_in(response.headers["content-type"], response.content)


def error_in(media_type: str, body: bytes) -> dict[str, Any]:
    assert media_type == "application/json"
    assert len(body) < 8192
    table: dict[str, Any] = json.loads(body)
    assert list(table) == ["error"]
    error: dict[str, Any] = table["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def payloads(response: httpx.Response) -> list[Any]:
    """The JSON of every event; [DONE] must be the last."""
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event[6:]) for event in events[:-2]]

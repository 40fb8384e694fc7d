"""Answers of /v1/responses, event by event or whole (lines run per request and per delta)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .choice import Delta
from .chunks import Head, to_json
from .request import TokenLogprob
from .response_items import Event, ResponseItems
from .stream import Stream
from .tokenizer import Tokenizer
from .tool_offer import OfferedTools
from .wire_errors import Refusal
from .wire_logprobs import chat_logprobs
from .wire_responses import ResponseBody

_STATUS = {"stop": "completed", "length": "incomplete"}  # of an answer, by how its one choice ended
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of an answer that failed on its way, by status


class ResponseWriter:
    """Items in OpenAI's order of events."""

    def __init__(self, head: Head, body: ResponseBody, tokenizer: Tokenizer, tools: OfferedTools | None = None) -> None:
        self._head = head
        self._body = body
        self._tokenizer = tokenizer
        self._items = ResponseItems(tools.new_parser() if tools else None, self._entries)
        self._num_events = 0
        self._finish_reason: str | None = None

    def opening(self) -> bytes:
        response = {"response": self._response("in_progress", [])}
        return self._told([("response.created", response), ("response.in_progress", response), *self._items.begin()])

    def chunks(self, index: int, delta: Delta) -> bytes:
        self._finish_reason = delta.finish_reason
        return self._told(self._items.add(delta))

    def closing(self, stream: Stream) -> bytes:
        status = _STATUS[self._finish_reason or "stop"]
        events = self._items.end(status)
        response = self._response(status, self._items.tables(status), stream)
        if stream.call.wants_timings:
            response["timings"] = stream.call.timings()
        return self._told([*events, (f"response.{status}", {"response": response})])

    def failing(self, refusal: Refusal) -> bytes:
        response = self._response("failed", self._items.tables("failed"))
        response["error"] = {"code": _CODES.get(refusal.status, "server_error"), "message": refusal.message}
        return self._told([("response.failed", {"response": response})])

    def add(self, index: int, delta: Delta) -> None:
        self._finish_reason = delta.finish_reason
        self._items.add(delta)

    def whole(self, stream: Stream) -> bytes:
        status = _STATUS[self._finish_reason or "stop"]
        self._items.end(status)
        return to_json(self._response(status, self._items.tables(status), stream))

    def _told(self, events: Iterable[Event]) -> bytes:
        return b"".join([self._event(kind, fields) for kind, fields in events])

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        payload = to_json({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), payload)

    def _entries(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        if not self._body.has_logprobs:
            return []
        entries: list[dict[str, Any]] = chat_logprobs(self._tokenizer, logprobs)["content"]
        return entries

    def _response(self, status: str, output: list[dict[str, Any]], stream: Stream | None = None) -> dict[str, Any]:
        body, wanted = self._body, self._body.text
        given = None if wanted is None else wanted.format
        text_format = {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self._head.model,
            "output": output,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": text_format},
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if stream is None else _usage_of(stream),
            "user": body.user,
            **body.tools_json(),
        }


def _usage_of(stream: Stream) -> dict[str, Any]:
    return {
        "input_tokens": stream.num_prompt,
        "input_tokens_details": {"cached_tokens": stream.num_cached, "cache_write_tokens": 0},
        "output_tokens": stream.num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stream.num_prompt + stream.num_output,
    }

"""Answers of /v1/responses, event by event or whole (lines run per request and per delta)."""

from __future__ import annotations

import uuid
from typing import Any

from .choice import Delta
from .chunks import Head, to_json
from .request import TokenLogprob
from .stream import Stream
from .tokenizer import Tokenizer
from .wire_errors import Refusal
from .wire_logprobs import chat_logprobs
from .wire_responses import ResponseBody

_STATUS = {"stop": "completed", "length": "incomplete"}  # of an answer, by how its one choice ended
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of an answer that failed on its way, by status


class ResponseWriter:
    """One message of one text part, in OpenAI's order of events."""

    def __init__(self, head: Head, body: ResponseBody, tokenizer: Tokenizer) -> None:
        self._head = head
        self._body = body
        self._tokenizer = tokenizer
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._place = {"output_index": 0, "item_id": self._item_id, "content_index": 0}
        self._num_events = 0
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: str | None = None

    def opening(self) -> bytes:
        response = self._response("in_progress", [])
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
                self._event("response.content_part.added", **self._place, part=self._part("", [])),
            )
        )

    def chunks(self, index: int, delta: Delta) -> bytes:
        self.add(index, delta)
        if not delta.text and not (delta.logprobs and self._body.has_logprobs):
            return b""
        logprobs = self._entries(delta.logprobs)
        return self._event("response.output_text.delta", **self._place, delta=delta.text, logprobs=logprobs)

    def closing(self, stream: Stream) -> bytes:
        status = _STATUS[self._finish_reason or "stop"]
        text, logprobs = "".join(self._texts), self._entries(self._logprobs)
        item = self._item(status, [self._part(text, logprobs)])
        response = self._response(status, [item], stream)
        if stream.call.wants_timings:
            response["timings"] = stream.call.timings()
        return b"".join(
            (
                self._event("response.output_text.done", **self._place, text=text, logprobs=logprobs),
                self._event("response.content_part.done", **self._place, part=self._part(text, logprobs)),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{status}", response=response),
            )
        )

    def failing(self, refusal: Refusal) -> bytes:
        text = "".join(self._texts)
        response = self._response("failed", [self._item("incomplete", [self._part(text, [])])] if text else [])
        response["error"] = {"code": _CODES.get(refusal.status, "server_error"), "message": refusal.message}
        return self._event("response.failed", response=response)

    def add(self, index: int, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._logprobs += delta.logprobs
        self._finish_reason = delta.finish_reason

    def whole(self, stream: Stream) -> bytes:
        status = _STATUS[self._finish_reason or "stop"]
        part = self._part("".join(self._texts), self._entries(self._logprobs))
        return to_json(self._response(status, [self._item(status, [part])], stream))

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = to_json({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), payload)

    def _item(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": parts}

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _entries(self, logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": text_format},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if stream is None else _usage_of(stream),
            "user": body.user,
        }


def _usage_of(stream: Stream) -> dict[str, Any]:
    return {
        "input_tokens": stream.num_prompt,
        "input_tokens_details": {"cached_tokens": stream.num_cached, "cache_write_tokens": 0},
        "output_tokens": stream.num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stream.num_prompt + stream.num_output,
    }

"""Answers of /v1/chat/completions, chunk by chunk or whole (lines run per request and per delta)."""

from __future__ import annotations

import secrets
from typing import Any

from .choice import Delta
from .chunks import NULL, Frame, Head, failure, to_json, usage_of
from .request import TokenLogprob
from .stream import Stream
from .tokenizer import Tokenizer
from .tool_calls import Arguments, CallStart, Content, Piece
from .tool_offer import OfferedTools
from .wire import wants_usage
from .wire_chat import ChatBody
from .wire_errors import Refusal
from .wire_logprobs import chat_logprobs

_OPENING = b'"delta":{"role":"assistant","content":""}'
_OPENING_OF_CALLS = b'"delta":{"role":"assistant","content":null}'  # there may be none
_ENDING = b'"delta":{}'


class _Choice:
    """One choice on its way, with what a whole answer needs of it."""

    def __init__(self, tools: OfferedTools | None) -> None:
        self._tools = tools
        self._parser = tools.new_parser() if tools else None
        self.content: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None

    def pieces(self, delta: Delta) -> list[Piece]:
        """What a delta brings."""
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        pieces = self._parser.push(delta.text)
        return pieces if delta.finish_reason is None else pieces + self._parser.finish()

    def finish(self, reason: str) -> str:
        """The reason as the endpoint says it. A stop string may cut a call short: nobody should make that one."""
        if self._tools is None or self._parser is None or not self._parser.is_whole:
            return reason
        return self._tools.calls_end_by if reason == "stop" else reason

    def keep(self, piece: Piece) -> None:
        match piece:
            case Content(text):
                self.content.append(text)
            case CallStart(_, name):
                self.calls.append(_new_call(name))
            case Arguments(call, text):
                self.calls[call]["function"]["arguments"] += text


class ChatWriter:
    """First the role, then text and tool calls, and the reason in a chunk of its own."""

    def __init__(
        self,
        head: Head,
        body: ChatBody,
        num_choices: int,
        tokenizer: Tokenizer,
        tools: OfferedTools | None = None,
    ) -> None:
        self._head = head
        self._frame = Frame(head, "chat.completion.chunk", wants_usage(body))
        self._has_logprobs = bool(body.logprobs)
        self._tokenizer = tokenizer
        self._opening = _OPENING_OF_CALLS if tools else _OPENING
        self._choices = [_Choice(tools) for _ in range(num_choices)]
        is_plain = body.stream and not tools and not self._has_logprobs
        self._around = [
            self._frame.around(index, b'"delta":{"content":', b"}") for index in range(num_choices if is_plain else 0)
        ]

    def opening(self) -> bytes:
        return b"".join(self._frame.chunk(index, self._opening) for index in range(len(self._choices)))

    def chunks(self, index: int, delta: Delta) -> bytes:
        if self._around and delta.text and delta.finish_reason is None:
            head, tail = self._around[index]
            return head + to_json(delta.text) + tail
        choice = self._choices[index]
        parts = [_delta(piece) for piece in choice.pieces(delta)]
        logprobs = to_json(chat_logprobs(self._tokenizer, delta.logprobs)) if self._has_logprobs else NULL
        if delta.logprobs and not parts:
            parts = [b'"delta":{"content":""}']
        chunks = b"".join(
            self._frame.chunk(index, part, NULL if number else logprobs) for number, part in enumerate(parts)
        )
        if delta.finish_reason is not None:
            reason = choice.finish(delta.finish_reason)
            chunks += self._frame.chunk(index, _ENDING, finish=to_json(reason))
        return chunks

    def closing(self, stream: Stream) -> bytes:
        return self._frame.closing(stream)

    def failing(self, refusal: Refusal) -> bytes:
        return failure(refusal)

    def add(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        for piece in choice.pieces(delta):
            choice.keep(piece)
        choice.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            choice.finish_reason = choice.finish(delta.finish_reason)

    def whole(self, stream: Stream) -> bytes:
        answer = {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": usage_of(stream),
        }
        return to_json(answer)

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": "".join(choice.content), "refusal": None}
        if choice.calls:
            message |= {"content": message["content"] or None, "tool_calls": choice.calls}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self._tokenizer, choice.logprobs) if self._has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }


def _new_call(name: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }


def _delta(piece: Piece) -> bytes:
    match piece:
        case Content(text):
            return b'"delta":{"content":' + to_json(text) + b"}"
        case CallStart(call, name):
            return b'"delta":{"tool_calls":[' + to_json({"index": call, **_new_call(name)}) + b"]}"
        case Arguments(call, text):
            part = to_json({"index": call, "function": {"arguments": text}})
            return b'"delta":{"tool_calls":[' + part + b"]}"

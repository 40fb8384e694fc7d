"""Answers of /v1/chat/completions, chunk by chunk or whole (lines run per request and per delta)."""

from __future__ import annotations

from .choice import Delta
from .chunks import NULL, Frame, Head, to_json, usage_of
from .stream import Stream
from .tokenizer import Tokenizer
from .wire import wants_usage
from .wire_chat import ChatBody
from .wire_logprobs import chat_logprobs

_OPENING = b'"delta":{"role":"assistant","content":""}'
_ENDING = b'"delta":{}'


class ChatWriter:
    """First the role, then text, and the reason in a chunk of its own."""

    def __init__(self, head: Head, body: ChatBody, num_choices: int, tokenizer: Tokenizer) -> None:
        self._head = head
        self._frame = Frame(head, "chat.completion.chunk", wants_usage(body))
        self._has_logprobs = bool(body.logprobs)
        self._tokenizer = tokenizer
        self._deltas: list[list[Delta]] = [[] for _ in range(num_choices)]

    def opening(self) -> bytes:
        return b"".join(self._frame.chunk(index, _OPENING) for index in range(len(self._deltas)))

    def chunks(self, index: int, delta: Delta) -> bytes:
        chunks = b""
        if delta.text or delta.logprobs:
            logprobs = to_json(chat_logprobs(self._tokenizer, delta.logprobs)) if self._has_logprobs else NULL
            chunks = self._frame.chunk(index, b'"delta":{"content":' + to_json(delta.text) + b"}", logprobs)
        if delta.finish_reason is not None:
            chunks += self._frame.chunk(index, _ENDING, finish=to_json(delta.finish_reason))
        return chunks

    def closing(self, stream: Stream) -> bytes:
        return self._frame.closing(stream)

    def add(self, index: int, delta: Delta) -> None:
        self._deltas[index].append(delta)

    def whole(self, stream: Stream) -> bytes:
        answer = {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._choice(index, deltas) for index, deltas in enumerate(self._deltas)],
            "usage": usage_of(stream),
        }
        return to_json(answer)

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, object]:
        text = "".join(delta.text for delta in deltas)
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(self._tokenizer, logprobs) if self._has_logprobs else None,
            "finish_reason": deltas[-1].finish_reason,
        }

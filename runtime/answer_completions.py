"""Answers of /v1/completions, chunk by chunk or whole (lines run per request and per delta)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .choice import Delta
from .chunks import NULL, Frame, Head, to_json, usage_of
from .request import TokenLogprob
from .stream import Stream
from .tokenizer import Tokenizer
from .wire import wants_usage
from .wire_completions import CompletionBody
from .wire_logprobs import LegacyLogprobs

_ENDING = b'"text":""'


class Echo(NamedTuple):
    """A prompt that its choices repeat; `text` lacks the BOS that a tokenizer put before it."""

    text: str
    token_ids: Sequence[int]


NO_ECHO = Echo("", ())


class _Choice:
    """What came of one choice."""

    def __init__(self, tokenizer: Tokenizer, echo: Echo) -> None:
        self.echo = echo
        self.is_echoed = not echo.token_ids
        self.deltas: list[Delta] = []
        num_hidden = len(tokenizer.decode(echo.token_ids, skip_special_tokens=False)) - len(echo.text)
        self.lists = LegacyLogprobs(tokenizer, -num_hidden)


class CompletionWriter:
    """Text, and the reason in a chunk of its own. `echoes` has one entry a choice."""

    def __init__(
        self, head: Head, body: CompletionBody, stream: Stream, tokenizer: Tokenizer, echoes: Sequence[Echo]
    ) -> None:
        self._head = head
        self._frame = Frame(head, "text_completion", wants_usage(body))
        self._num_top = body.logprobs
        self._stream = stream
        self._choices = [_Choice(tokenizer, echo) for echo in echoes]

    def opening(self) -> bytes:
        return b""

    def chunks(self, index: int, delta: Delta) -> bytes:
        choice = self._choices[index]
        chunks = b""
        if not choice.is_echoed:
            choice.is_echoed = True
            chunks = self._chunk(index, choice.echo.text, choice.echo.token_ids, self._prompt_logprobs(index))
        if delta.text or delta.logprobs:
            chunks += self._chunk(index, delta.text, delta.token_ids, delta.logprobs)
        if delta.finish_reason is not None:
            chunks += self._frame.chunk(index, _ENDING, finish=to_json(delta.finish_reason))
        return chunks

    def _chunk(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> bytes:
        lists = NULL
        if self._num_top is not None:
            lists = to_json(self._choices[index].lists.take(token_ids, logprobs, self._num_top))
        return self._frame.chunk(index, b'"text":' + to_json(text), lists)

    def _prompt_logprobs(self, index: int) -> Sequence[TokenLogprob | None]:
        return self._stream.prompt_logprobs.get(index, ())

    def closing(self, stream: Stream) -> bytes:
        return self._frame.closing(stream)

    def add(self, index: int, delta: Delta) -> None:
        self._choices[index].deltas.append(delta)

    def whole(self, stream: Stream) -> bytes:
        answer = {
            "id": self._head.id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": usage_of(stream),
        }
        return to_json(answer)

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        lists = None
        if self._num_top is not None:
            token_ids = [*choice.echo.token_ids, *(token for delta in choice.deltas for token in delta.token_ids)]
            logprobs = [*self._prompt_logprobs(index), *(entry for delta in choice.deltas for entry in delta.logprobs)]
            lists = choice.lists.take(token_ids, logprobs, self._num_top)
        return {
            "index": index,
            "text": choice.echo.text + "".join(delta.text for delta in choice.deltas),
            "logprobs": lists,
            "finish_reason": choice.deltas[-1].finish_reason,
        }

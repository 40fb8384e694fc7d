"""Answers of /v1/completions, chunk by chunk or whole (lines run per request and per delta)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .choice import Delta
from .chunks import NULL, Frame, Head, failure, to_json, usage_of
from .request import TokenLogprob
from .stream import Stream
from .tokenizer import Tokenizer
from .wire import wants_usage
from .wire_completions import CompletionBody
from .wire_errors import Refusal
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

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, the one that ended it included."""
        logprobs = [entry.logprob for delta in self.deltas for entry in delta.logprobs]
        return math.fsum(logprobs) / len(logprobs) if logprobs else 0.0


class CompletionWriter:
    """Text, and the reason in a chunk of its own. `echoes` has one entry for each choice that is made."""

    def __init__(
        self, head: Head, body: CompletionBody, stream: Stream, tokenizer: Tokenizer, echoes: Sequence[Echo]
    ) -> None:
        self._head = head
        self._frame = Frame(head, "text_completion", wants_usage(body))
        self._has_logprobs = body.logprobs is not None
        self._num_made = (body.best_of or body.n or 1) if body.is_ranked else None  # of each prompt
        self._num_shown = body.n or 1
        self._stream = stream
        self._choices = [_Choice(tokenizer, echo) for echo in echoes]
        is_plain = body.stream and not body.echo and not self._has_logprobs
        self._around = [self._frame.around(index, b'"text":') for index in range(len(echoes) if is_plain else 0)]

    def opening(self) -> bytes:
        return b""

    def chunks(self, index: int, delta: Delta) -> bytes:
        if self._around and delta.text and delta.finish_reason is None:
            head, tail = self._around[index]
            return head + to_json(delta.text) + tail
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
        if self._has_logprobs:
            lists = to_json(self._choices[index].lists.take(token_ids, logprobs))
        return self._frame.chunk(index, b'"text":' + to_json(text), lists)

    def _prompt_logprobs(self, index: int) -> Sequence[TokenLogprob | None]:
        return self._stream.prompt_logprobs.get(index, ())

    def closing(self, stream: Stream) -> bytes:
        return self._frame.closing(stream)

    def failing(self, refusal: Refusal) -> bytes:
        return failure(refusal)

    def add(self, index: int, delta: Delta) -> None:
        self._choices[index].deltas.append(delta)

    def whole(self, stream: Stream) -> bytes:
        answer = {
            "id": self._head.id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._whole_choice(place, index) for place, index in enumerate(self._shown())],
            "usage": usage_of(stream),
        }
        return to_json(answer)

    def _shown(self) -> Sequence[int]:
        """The choices that are answered: all, or those with the best mean logprob of each prompt, the best first."""
        indices = range(len(self._choices))
        if self._num_made is None:
            return indices
        shown: list[int] = []
        for first in indices[:: self._num_made]:
            made = indices[first : first + self._num_made]
            ranked = sorted(made, key=lambda index: self._choices[index].mean_logprob, reverse=True)
            shown += ranked[: self._num_shown]
        return shown

    def _whole_choice(self, place: int, index: int) -> dict[str, Any]:
        choice, lists = self._choices[index], None
        if self._has_logprobs:
            token_ids = [*choice.echo.token_ids, *(token for delta in choice.deltas for token in delta.token_ids)]
            logprobs = [*self._prompt_logprobs(index), *(entry for delta in choice.deltas for entry in delta.logprobs)]
            lists = choice.lists.take(token_ids, logprobs)
        return {
            "index": place,
            "text": choice.echo.text + "".join(delta.text for delta in choice.deltas),
            "logprobs": lists,
            "finish_reason": choice.deltas[-1].finish_reason,
        }

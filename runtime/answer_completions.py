"""Answers of /v1/completions, chunk by chunk or whole (lines run per request and per delta)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from .choice import Delta
from .chunks import NULL, Frame, Head, failure, to_json, usage_of
from .detokenizer import detokenizer
from .request import TokenLogprob
from .stream import Stream
from .tokenizer import Tokenizer
from .wire import wants_usage
from .wire_completions import CompletionBody
from .wire_errors import Refusal
from .wire_logprobs import Offsets, legacy_logprobs

_ENDING = b'"text":""'
Lists = dict[str, list[Any]]


class Given(NamedTuple):
    """A prompt, and what its choices repeat of it, None for nothing.

    `echo` lacks the first `num_hidden` characters of the tokens' text, a BOS that a tokenizer put before it; where it
    `is_cut` also the last, unfinished one, which the outputs begin with.
    """

    token_ids: list[int]
    echo: str | None = None
    num_hidden: int = 0
    is_cut: bool = False


class _Choice:
    """What came of one choice."""

    def __init__(self, tokenizer: Tokenizer, given: Given, skips_special: bool) -> None:
        self.given = given
        self.is_echoed = given.echo is None
        self.deltas: list[Delta] = []
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._num_sent = 0  # characters

    @cached_property
    def _offsets(self) -> Offsets:
        given = self.given
        text = detokenizer(self._tokenizer, given.token_ids, self._skips_special, keeps_mark=given.is_cut)
        return Offsets(self._tokenizer, text, len(given.echo or ""))

    def echo_lists(self, logprobs: Sequence[TokenLogprob | None]) -> Lists:
        """The lists of the prompt that is repeated."""
        tokenizer, (token_ids, echo, num_hidden, _) = self._tokenizer, self.given
        self._num_sent = len(echo or "")
        text = detokenizer(tokenizer, (), skip_special_tokens=False)
        offsets = Offsets(tokenizer, text, -num_hidden).take(token_ids, self._num_sent)
        return legacy_logprobs(tokenizer, token_ids, logprobs, offsets)

    def lists(self, delta: Delta) -> Lists:
        """The lists of the next delta."""
        self._num_sent += len(delta.text)
        offsets = self._offsets.take(delta.token_ids, self._num_sent)
        return legacy_logprobs(self._tokenizer, delta.token_ids, delta.logprobs, offsets)

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, the one that ended it included."""
        logprobs = [entry.logprob for delta in self.deltas for entry in delta.logprobs]
        return math.fsum(logprobs) / len(logprobs) if logprobs else 0.0


class CompletionWriter:
    """Text, and the reason in a chunk of its own. `given` has one entry for each choice that is made."""

    def __init__(
        self, head: Head, body: CompletionBody, stream: Stream, tokenizer: Tokenizer, given: Sequence[Given]
    ) -> None:
        self._head = head
        self._frame = Frame(head, "text_completion", wants_usage(body))
        self._has_logprobs = body.logprobs is not None
        self._num_made = (body.best_of or body.n or 1) if body.is_ranked else None  # of each prompt
        self._num_shown = body.n or 1
        self._stream = stream
        self._choices = [_Choice(tokenizer, prompt, body.skip_special_tokens is not False) for prompt in given]
        is_plain = body.stream and not body.echo and not self._has_logprobs
        self._around = [self._frame.around(index, b'"text":') for index in range(len(given) if is_plain else 0)]

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
            lists = choice.echo_lists(self._prompt_logprobs(index)) if self._has_logprobs else None
            chunks = self._chunk(index, choice.given.echo or "", lists)
        if delta.text or delta.logprobs:
            chunks += self._chunk(index, delta.text, choice.lists(delta) if self._has_logprobs else None)
        if delta.finish_reason is not None:
            chunks += self._frame.chunk(index, _ENDING, finish=to_json(delta.finish_reason))
        return chunks

    def _chunk(self, index: int, text: str, lists: Lists | None) -> bytes:
        return self._frame.chunk(index, b'"text":' + to_json(text), NULL if lists is None else to_json(lists))

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
            parts = [] if choice.is_echoed else [choice.echo_lists(self._prompt_logprobs(index))]
            parts += map(choice.lists, choice.deltas)
            lists = {name: [item for part in parts for item in part[name]] for name in parts[0]}
        return {
            "index": place,
            "text": (choice.given.echo or "") + "".join(delta.text for delta in choice.deltas),
            "logprobs": lists,
            "finish_reason": choice.deltas[-1].finish_reason,
        }

"""One choice's events as text deltas: the same path for a stream and for a whole answer (called per step)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ostinato.engines.errors import RequestError

from .detokenizer import detokenizer
from .plan import new_tuple
from .request import Event, SamplingParams, TokenLogprob
from .stops import StopMatcher
from .tokenizer import Tokenizer


class Delta(NamedTuple):
    """What a caller may see next. `token_ids` and `logprobs` cover the tokens whose text is all out by now, each once.

    The last delta has a `finish_reason` ("stop" | "length" | "abort" | "error", the last with `error`) and every token
    that is left, those that a stop string cut away too. `logprobs` is empty where none were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None = None
    error: RequestError | None = None


class _Token(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None
    end: int  # characters of output text up to its end, an unfinished one included


def _end(token: _Token) -> int:
    return token.end


def _tokens_of(event: Event) -> Sequence[tuple[int | None, TokenLogprob | None, str | None]]:
    """Each token of an event as if it had come alone; how it ended belongs to the last."""
    if not event.forced:
        return ((event.token_id, event.logprob, event.finish),)
    *between, last = event.forced
    return [
        (event.token_id, event.logprob, None),
        *((token, None, None) for token in between),
        (last, None, event.finish),
    ]


class ChoiceStream:
    """Turns events into deltas; a whole answer is the join of its deltas.

    Rules. Stop strings are looked for in text that comes after the first `min_tokens` tokens, and lie wholly in it.
    The token of an EOS or stop id has no text, unless `include_stop_str_in_output`. After a stop string was found
    `wants_abort` is True while the engine's row still runs, and later events of that row are ignored.

    `completion_tokens` counts up to and including the token that completed a stop string, or the stop id.
    `num_cached` and `prompt_logprobs` are kept from the first event. `keeps_mark`: see the detokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams, *, keeps_mark: bool = False
    ) -> None:
        self._detokenizer = detokenizer(tokenizer, prompt_ids, params.skip_special_tokens, keeps_mark=keeps_mark)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._shows_stop_id = params.include_stop_str_in_output
        self._tokens: list[_Token] = []  # not yet in a delta
        self._num_chars = 0  # of text that came out of the detokenizer
        self._num_shown = 0
        self.completion_tokens = 0
        self.num_cached = 0
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.finish_reason: str | None = None
        self.wants_abort = False

    def push(self, event: Event) -> Delta | None:
        """The next delta, or None where an event shows nothing yet."""
        _, token_id, logprob, finish, _, num_cached, prompt_logprobs, forced = event
        if self.finish_reason is not None:
            return None
        if num_cached:
            self.num_cached = num_cached
        if prompt_logprobs is not None:
            self.prompt_logprobs = prompt_logprobs
        if token_id is not None and not (finish or forced or self._tokens or self._matcher):
            return self._push_plain(token_id, logprob)
        text, stopped = "", False
        for token_id, logprob, finish in _tokens_of(event):
            shown, stopped = self._show(self._text_of(token_id, logprob, finish), finish is not None)
            text += shown
            if stopped:
                break
        self._num_shown += len(text)
        if stopped:
            self.finish_reason, self.wants_abort = "stop", event.finish is None
            return Delta(text, *self._take(all_tokens=True), "stop")
        if event.finish is not None:
            self.finish_reason = event.finish
            return Delta(text, *self._take(all_tokens=True), event.finish, event.error)
        if not text:
            return None
        return Delta(text, *self._take(all_tokens=False))

    def _push_plain(self, token_id: int, logprob: TokenLogprob | None) -> Delta | None:
        """One token of many, where nothing is held back: what `push` does for any."""
        self.completion_tokens += 1
        detokenizer = self._detokenizer
        text = detokenizer.push_one(token_id)
        num_chars = len(text)
        self._num_chars += num_chars
        self._num_shown += num_chars
        if text and not detokenizer.holds:
            return new_tuple(Delta, (text, (token_id,), () if logprob is None else (logprob,), None, None))
        self._tokens.append(_Token(token_id, logprob, self._num_chars + detokenizer.holds))
        return Delta(text, *self._take(all_tokens=False)) if text else None

    def _text_of(self, token_id: int | None, logprob: TokenLogprob | None, finish: str | None) -> str:
        """The new text; at the end the unfinished character too."""
        text = ""
        if token_id is not None:
            self.completion_tokens += 1
            if finish != "stop" or self._shows_stop_id:
                text = self._detokenizer.push((token_id,))
        if finish is not None:
            text += self._detokenizer.finish()
        self._num_chars += len(text)
        if token_id is not None:
            end = self._num_chars + self._detokenizer.holds
            self._tokens.append(_Token(token_id, logprob, end))
        return text

    def _show(self, text: str, last: bool) -> tuple[str, bool]:
        """(the part that no stop string can reach any more, whether one was found)."""
        if self._matcher is None or self.completion_tokens <= self._min_tokens:
            return text, False
        shown, stopped = self._matcher.push(text)
        return shown + self._matcher.flush() if last and not stopped else shown, stopped

    def _take(self, *, all_tokens: bool) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        taken, self._tokens = self._tokens, []
        if not all_tokens and taken and taken[-1].end > self._num_shown:
            cut = bisect_right(taken, self._num_shown, key=_end)
            taken, self._tokens = taken[:cut], taken[cut:]
        logprobs = [token.logprob for token in taken if token.logprob is not None]
        return tuple([token.token_id for token in taken]), tuple(logprobs)

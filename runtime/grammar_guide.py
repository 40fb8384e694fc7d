"""A compiled grammar, and what follows one output along it (a guide a choice, called per step)."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import llguidance
import numpy as np

from ostinato.engines.errors import RequestError
from ostinato.plugins.sampling_rows import I32

_MAX_SHOWN_CHARS = 200
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")  # how a special token stands among forced bytes


class Vocabulary(NamedTuple):
    """What guides know of a model's tokens."""

    tokenizer: llguidance.LLTokenizer
    end_ids: frozenset[int]
    special_ids: frozenset[int]

    @property
    def num_words(self) -> int:
        return -(-self.tokenizer.vocab_size // 32)

    def spelled(self, forced: bytes) -> Iterator[int]:
        """Tokens of forced bytes where characters stay characters, though they be a special token's name."""
        for place, part in enumerate(_SPECIAL.split(forced)):
            if place % 2:
                yield int(part)
            else:
                yield from self.tokenizer.greedy_tokenize(part.decode(errors="ignore"))


class GrammarGuide:
    """The end tokens are legal only where the output is whole, and where nothing else may follow only they are.

    Where the grammar forces the next text, its tokens are those that the tokenizer would give it, one mask of one
    token after the other; so an output is the same whether forced tokens are sampled or taken ahead.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, jumps: bool) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_words = vocabulary.num_words
        self._end_ids = vocabulary.end_ids
        self._jumps = jumps
        self._next: deque[int] = deque()  # forced tokens that were not accepted yet
        self._has_ended = False
        self._look_ahead()

    def fill_mask(self, words: I32) -> None:
        if self._next:
            at, bit = divmod(self._next[0], 32)
            words[:] = 0
            words.view(np.uint32)[at] = 1 << bit
            return
        if self._has_ended:
            words[:] = 0
            return
        words[self._num_words :] = 0  # of a vocabulary wider than the tokenizer's
        own = words[: self._num_words]
        self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        self._check()

    def accept(self, token_id: int) -> None:
        if self._next and token_id != self._next[0]:
            raise RequestError(f"token {token_id} came where only token {self._next[0]} may")
        if self._has_ended or not self._matcher.consume_token(token_id):
            self._check()
            raise RequestError(f"token {token_id} came after the output's end")
        if self._next:
            self._next.popleft()
        if token_id in self._end_ids:
            self._has_ended = True
        elif not self._next:
            self._look_ahead()

    def forced(self) -> Sequence[int]:
        return tuple(self._next) if self._jumps else ()

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def _look_ahead(self) -> None:
        forced: Iterable[int] = self._matcher.compute_ff_tokens()
        if not self._vocabulary.special_ids.isdisjoint(forced):
            forced = self._vocabulary.spelled(self._matcher.compute_ff_bytes())
        for token_id in forced:
            if token_id in self._end_ids:  # which one of them is the sampler's choice
                break
            self._next.append(token_id)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0][:_MAX_SHOWN_CHARS]
            raise RequestError(f"the grammar can't be followed any further: {reason}")


class Grammar:
    """A compiled grammar. `num_bytes`: about what it takes."""

    def __init__(self, seed: llguidance.LLMatcher, vocabulary: Vocabulary, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._seed = seed
        self._vocabulary = vocabulary

    def start(self, *, jumps: bool = False) -> GrammarGuide:
        """A guide for one choice. With `jumps` it tells the tokens that need not be sampled."""
        return GrammarGuide(self._seed.deep_copy(), self._vocabulary, jumps)

"""A compiled grammar, and what follows one output along it (a guide a choice, called per step)."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import llguidance
import numpy as np

from ostinato.engines.errors import OstinatoError, RequestError
from ostinato.plugins.sampling_rows import I32

from .grammar_fault import TOO_COSTLY, is_costly

SLOW_SECONDS = 0.02  # of a processor, for one mask or token: a thousand times what JSON takes
MAX_SLOW = 3  # in one output
MAX_RUN_BYTES = 8192  # that are forced in one piece: their tokens take 5 ms
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")  # how a special token stands among forced bytes


class Vocabulary(NamedTuple):
    """What the guides of a grammar know of the model's tokens."""

    tokenizer: llguidance.LLTokenizer
    end_ids: frozenset[int]
    special_ids: frozenset[int]
    looks_ahead: bool = True  # for what is forced

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


class Beginning(NamedTuple):
    """What all outputs of a grammar begin with: tokens that are forced, or else the mask of the first one."""

    forced: Sequence[int]
    mask: I32


class GrammarGuide:
    """The end tokens are legal only where the output is whole, and where nothing else may follow only they are.

    Where the grammar forces the next text and that is looked for, its tokens are those that the tokenizer would give,
    one mask of one token after the other; so an output is the same whether forced tokens are sampled or taken ahead.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        beginning: Beginning | None = None,
        *,
        jumps: bool = False,
        param: str | None = None,
    ) -> None:
        self._matcher = matcher
        self._param = param
        self._vocabulary = vocabulary
        self._num_words = vocabulary.num_words
        self._end_ids = vocabulary.end_ids
        self._jumps = jumps
        self._next: deque[int] = deque()  # forced tokens that were not accepted yet
        self._has_ended = False
        self._num_slow = 0
        self._first = None if beginning is None else beginning.mask
        if beginning is None:
            self._look_ahead()
        else:
            self._next.extend(beginning.forced)

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
        if self._first is not None:
            own[:] = self._first
            return
        with self._watched():
            self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        self._check()
        if not own.any():
            raise self._no_token()

    def accept(self, token_id: int) -> None:
        if self._next and token_id != self._next[0]:
            raise OstinatoError(f"token {token_id} came where only token {self._next[0]} may")
        if self._has_ended:
            raise OstinatoError(f"token {token_id} came after the output's end")
        self._first = None
        with self._watched():
            is_legal = self._matcher.consume_token(token_id)
        if not is_legal:
            self._check()
            raise OstinatoError(f"token {token_id} is not legal at this place")
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
        if not self._vocabulary.looks_ahead:
            return
        if len(self._matcher.compute_ff_bytes()) > MAX_RUN_BYTES:  # of brackets that were opened and must be closed
            raise self._too_costly()
        forced: Iterable[int] = self._matcher.compute_ff_tokens()
        self._check()
        if not self._vocabulary.special_ids.isdisjoint(forced):
            forced = self._vocabulary.spelled(self._matcher.compute_ff_bytes())
        for token_id in forced:
            if token_id in self._end_ids:  # which one of them is the sampler's choice
                break
            self._next.append(token_id)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """What the compiler does not count may grow with the output, too: it ends who is slow again and again."""
        began_at = time.thread_time()
        yield
        self._num_slow += time.thread_time() - began_at > SLOW_SECONDS
        if self._num_slow > MAX_SLOW:
            raise self._too_costly()

    def _check(self) -> None:
        """Errors that are the grammar's are its caller's; the rest would be ours."""
        if not self._matcher.is_error():
            return
        message = self._matcher.get_error()
        if "NoExtension" in message:
            raise self._no_token()
        if is_costly(message):
            raise self._too_costly()
        raise OstinatoError("the grammar can't be followed any further")

    def _too_costly(self) -> RequestError:
        return RequestError(f"the output ends here: {TOO_COSTLY}", param=self._param, code="grammar_too_costly")

    def _no_token(self) -> RequestError:
        return RequestError(
            "the output can't go on: none of the model's tokens is legal at this place of the grammar",
            param=self._param,
            code="no_legal_token",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar. `num_bytes`: about what it takes; `param`: the field that asked for it, which errors name."""

    num_bytes: int
    seed: llguidance.LLMatcher
    vocabulary: Vocabulary
    beginning: Beginning
    param: str | None = None

    @classmethod
    def of_seed(cls, seed: llguidance.LLMatcher, vocabulary: Vocabulary, num_bytes: int) -> Grammar:
        """Made off the loop, and with it what each of its outputs would ask for first."""
        guide, mask = GrammarGuide(seed.deep_copy(), vocabulary, jumps=True), np.zeros(vocabulary.num_words, np.int32)
        forced = guide.forced()
        guide.fill_mask(mask)
        return cls(num_bytes + mask.nbytes, seed, vocabulary, Beginning(forced, mask))

    def of(self, param: str) -> Grammar:
        """The same one, asked for by another field."""
        return self if param == self.param else replace(self, param=param)

    def start(self, *, jumps: bool = False) -> GrammarGuide:
        """A guide for one choice. With `jumps` it tells the tokens that need not be sampled."""
        return GrammarGuide(self.seed.deep_copy(), self.vocabulary, self.beginning, jumps=jumps, param=self.param)

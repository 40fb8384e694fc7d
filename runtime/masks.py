"""Which tokens a step's lines may give: stop ids before min_tokens, guides, forced tokens (made per step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ostinato.plugins.sampling_rows import I32

from .guide import log_failure
from .mask_time import MaskTime
from .plan import Plan
from .request import Request, Status
from .timeline import guiding

WORD_BITS = 32  # of a mask
ALL = -1  # a word, and a line's number where it has no mask


class StepMasks(NamedTuple):
    """Masks that are known now, [n, W], and the one of each line, [S]; from n on, those that come late."""

    masks: I32
    rows: I32
    num_late: int


@dataclass(frozen=True, slots=True)
class Guards:
    """Lines whose stop ids are masked while min_tokens are not reached; equal masks are shared."""

    until: I32  # [S] output tokens
    rows: I32  # [S]
    masks: I32  # [n, W]


class Masks:
    """Makes masks for a vocabulary of V tokens in W = ⌈V/32⌉ words."""

    def __init__(self, vocab_size: int, time: MaskTime | None = None) -> None:
        self.num_words = -(-vocab_size // WORD_BITS)
        self._time = time or MaskTime()
        self.none = np.zeros((0, self.num_words), np.int32)

    def guards(self, requests: Sequence[Request | None]) -> Guards | None:
        """The guards of lines, but for those that are None; None if there is nothing to guard."""
        number: dict[frozenset[int], int] = {}
        until = np.zeros(len(requests), np.int32)
        rows = np.full(len(requests), ALL, np.int32)
        for line, request in enumerate(requests):
            if request is not None and request.params.min_tokens and request.stop_ids:
                until[line] = request.params.min_tokens
                rows[line] = number.setdefault(request.stop_ids, len(number))
        return Guards(until, rows, np.stack([self._without(ids) for ids in number])) if number else None

    def forced(self, token_ids: Sequence[int]) -> I32:
        """Masks of one token each."""
        masks = np.zeros((len(token_ids), self.num_words), np.int32)
        ids = np.array(token_ids, np.uint32)
        masks.view(np.uint32)[np.arange(len(ids)), ids // WORD_BITS] = np.uint32(1) << ids % np.uint32(WORD_BITS)
        return masks

    def guided(self, requests: Sequence[Request], num_output: Sequence[int]) -> I32:
        """What the guides allow as each request's output token of that number; anything where the request is put off,
        and where what is sampled will be thrown away.
        """
        masks = np.full((len(requests), self.num_words), ALL, np.int32)
        lines = [
            line
            for line, (request, number) in enumerate(zip(requests, num_output, strict=True))
            if request.status is not Status.FINISHED and number == request.num_output
        ]
        for turn in self._time.turns([requests[line] for line in lines]):
            words, request = masks[lines[turn]], requests[lines[turn]]
            self._fill(words, request)
            if request.num_output < request.params.min_tokens and request.stop_ids:
                others = words & self._without(request.stop_ids)
                if others.any():  # else the output can only end here, or needs that token: the form wins
                    words[:] = others
        return masks

    def late(self, plan: Plan) -> I32:
        """The masks of the lines whose guide did not know their input when the plan was packed."""
        rows = [row for row in plan.rows if row.fed_from >= 0 and row.num_sampled and row.request.guide is not None]
        return self.guided([row.request for row in rows], [row.end - row.request.num_prompt for row in rows])

    def _fill(self, words: I32, request: Request) -> None:
        """A guide that fails allows nothing, which ends its request and no other."""
        assert request.guide is not None, "no guide to ask"
        try:
            with guiding(request.timeline):
                request.guide.fill_mask(words)
        except Exception as error:
            log_failure(request.id, error)
            request.fault = error
            words[:] = 0

    def _without(self, ids: frozenset[int]) -> I32:
        """A mask of all tokens but `ids`, [W]."""
        words: I32 = np.full(self.num_words, ALL, np.int32)
        at, bit = np.divmod(np.fromiter(ids, np.uint32, len(ids)), np.uint32(WORD_BITS))
        np.bitwise_and.at(words.view(np.uint32), at, ~(np.uint32(1) << bit))
        return words

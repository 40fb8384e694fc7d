"""What sampling keeps of each running request: its parameters, and uniforms drawn ahead (read per step)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ostinato.plugins.philox import uniforms
from ostinato.plugins.sampling_rows import F32, I32

from .request import SEED_BITS, Request, SamplingParams
from .row_sets import Index, RowSet

NO_LOGPROBS = -1
DRAW_AHEAD = 16  # output tokens whose uniforms are drawn at once: a call costs nearly the same for many as for one
NOTHING_DRAWN = -(2**30)  # as the first output token that is drawn, far from all that come
SCORING = SamplingParams(temperature=0.0)  # a prompt token's logprob is the model's own, without bias and penalties
NUMBERS = {
    "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "repetition": np.float32,
    "presence": np.float32, "frequency": np.float32, "num_logprobs": np.int32,
}  # fmt: skip


class SamplingSeats:
    """A line a seat, filled when somebody is seated there; `scored`, one past the last seat, is for scored tokens."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self.scored = max_rows
        self._vocab_size = vocab_size
        self._numbers = {name: np.zeros(max_rows + 1, dtype) for name, dtype in NUMBERS.items()}
        self._arrivals = np.zeros(max_rows, np.intp)
        self._seeds = np.zeros(max_rows, np.uint64)
        self._choices = np.zeros(max_rows, np.uint32)
        self._first = np.zeros(max_rows, np.int32)
        self._drawn = np.zeros((max_rows, DRAW_AHEAD), np.float32)  # from output token `_first` on
        self._write(self.scored, SCORING)

    def join(self, row_set: RowSet) -> None:
        """Take in those who came new."""
        for row in np.flatnonzero(self._arrivals[row_set.seats] != row_set.arrivals).tolist():
            seat, request = int(row_set.seats[row]), row_set.requests[row]
            self._write(seat, request.params)
            self._seeds[seat], self._choices[seat] = request.seed % 2**SEED_BITS, request.choice
            self._first[seat] = NOTHING_DRAWN
        self._arrivals[row_set.seats] = row_set.arrivals

    def _write(self, seat: int, p: SamplingParams) -> None:
        top_k = min(max(p.top_k, 0), self._vocab_size)
        num_logprobs = NO_LOGPROBS if p.logprobs is None else p.logprobs
        penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        values = (p.temperature, top_k, p.top_p, p.min_p, *penalties, num_logprobs)
        for array, value in zip(self._numbers.values(), values, strict=True):
            array[seat] = value

    def numbers(self, owners: Index) -> Mapping[str, Any]:
        """The arrays [S] that SamplingRows and DeviceRows share, by name, for lines with these seats."""
        return {name: array[owners] for name, array in self._numbers.items()}

    def uniforms(self, seats: Index, num_output: I32) -> F32:
        """The uniform of each seat's output token of that number, [S]."""
        drawn: F32 = self._drawn[seats, self._ahead(seats, num_output)]
        return drawn

    def upcoming(self, seats: Index, num_output: I32) -> F32:
        """The same, and below it those of the tokens that follow, for as long as each is drawn, [n, S]."""
        ahead = self._ahead(seats, num_output)
        tokens = np.arange(DRAW_AHEAD - ahead.max(initial=0))[:, None]
        drawn: F32 = self._drawn[seats, ahead + tokens]
        return drawn

    def _ahead(self, seats: Index, num_output: I32) -> I32:
        """How far each seat's token is in what is drawn for it; who has come to the end draws."""
        ahead = num_output - self._first[seats]
        is_out = ahead.view(np.uint32) >= DRAW_AHEAD  # before the first, too
        if is_out.any():
            # Who joined draws alone. When one of the others runs out all draw, so that they run out together.
            is_new = self._first[seats] == NOTHING_DRAWN
            which = is_new if (is_new == is_out).all() else np.ones(len(seats), np.bool_)
            self._draw(seats[which], num_output[which])
            ahead[which] = 0
        return ahead

    def _draw(self, seats: Index, first: I32) -> None:
        shape = (len(seats), DRAW_AHEAD)
        seeds = np.broadcast_to(self._seeds[seats, None], shape).ravel()
        choices = np.broadcast_to(self._choices[seats, None], shape).ravel()
        indices = (first[:, None] + np.arange(DRAW_AHEAD, dtype=np.int32)).ravel().view(np.uint32)
        self._drawn[seats] = uniforms(seeds, choices, indices).reshape(shape)
        self._first[seats] = first


def num_prompt_logprobs(request: Request) -> int:
    """Of a scored token."""
    count = request.params.prompt_logprobs
    return NO_LOGPROBS if count is None else count

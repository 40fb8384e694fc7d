"""A step's sampled lines: what stays the same for a set of them, and what moves with every token (runs per step)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ostinato.plugins.sampling_rows import F32, I32

from .masks import ALL, Guards, Masks, StepMasks
from .request import Request
from .row_sets import Index, RowSet, StepRows
from .sampling_seats import SamplingSeats, num_prompt_logprobs
from .steady import SteadyRows

Array = TypeVar("Array", I32, Index)


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """What stays the same for a set of lines. A forced line gives a prompt token, whatever its logits."""

    row_set: RowSet
    num_sampled: tuple[int, ...]
    row_of: Index | None  # [S] each line's row; None where line i is row i
    requests: tuple[Request, ...]
    forced: Mapping[int, int]  # line → token
    guided: list[int]
    guards: Guards | None
    drawing: Index | None  # lines whose uniform counts; None where that is each
    is_argmax: bool  # in every line, so that no uniform counts
    seats: Index  # [S]; of a forced line the one for scored tokens
    unmasked: StepMasks
    undrawn: F32  # [S] zeros
    numbers: Mapping[str, Any]  # the other arrays [S] that SamplingRows and DeviceRows share, by name

    def of_rows(self, column: Array) -> Array:
        """A column of the rows [B] as one of the lines [S]."""
        return column if self.row_of is None else column[self.row_of]

    def num_output(self, rows: StepRows) -> I32:
        """The number of the output token that each line gives, [S]; any number in a forced line."""
        return self.of_rows(rows.ends - self.row_set.num_prompts)


class LinesMaker:
    """Finds the lines of a step among those of the steps before, or makes them."""

    def __init__(self, vocab_size: int, max_rows: int, num_kept: int) -> None:
        self.masks = Masks(vocab_size)
        self.seats = SamplingSeats(vocab_size, max_rows)
        self._kept: deque[Lines] = deque(maxlen=num_kept)
        self._steady: SteadyRows | None = None
        self._upcoming: F32 = np.zeros((0, 0), np.float32)  # the uniforms of its lines in steps from `_first_step` on
        self._first_step = 0

    def find(self, rows: StepRows) -> Lines:
        """One line per sampled position, in the order of the rows.

        Lines that force nothing hold for as long as their rows sample as many: a row that gave an output token has
        all of its prompt scored.
        """
        for kept in self._kept:
            if kept.row_set is rows.row_set and kept.num_sampled == rows.num_sampled:
                return kept
        lines = self._make(rows)
        if not lines.forced:
            self._kept.append(lines)
        return lines

    def step_masks(self, lines: Lines, rows: StepRows, num_output: I32, *, with_guides: bool = True) -> StepMasks:
        """Which tokens each line may give; nothing is made while every one may give all."""
        guards = lines.guards
        guarded = None if guards is None else num_output < guards.until
        guided = lines.guided if with_guides else []
        if not (lines.forced or guided or (guarded is not None and guarded.any())):
            return lines.unmasked
        masks, mask_rows = [self.masks.none], np.full(len(lines.requests), ALL, np.int32)
        if guards is not None and guarded is not None:
            mask_rows = np.where(guarded, guards.rows, mask_rows)
            masks.append(guards.masks)
        if lines.forced:
            first, number = sum(map(len, masks)), {token: at for at, token in enumerate(set(lines.forced.values()))}
            mask_rows[list(lines.forced)] = [first + number[token] for token in lines.forced.values()]
            masks.append(self.masks.forced(list(number)))
        num_late = 0
        if guided:
            is_fed = np.zeros(len(mask_rows), np.bool_) if rows.fed_from is None else lines.of_rows(rows.fed_from) >= 0
            known = [line for line in guided if not is_fed[line]]
            late = [line for line in guided if is_fed[line]]
            mask_rows[known + late] = sum(map(len, masks)) + np.arange(len(guided))
            masks.append(self.masks.guided([lines.requests[line] for line in known], num_output[known].tolist()))
            num_late = len(late)
        return StepMasks(np.concatenate(masks), mask_rows, num_late)

    def uniforms(self, lines: Lines, rows: StepRows, num_output: I32) -> F32:
        """[S]"""
        if lines.is_argmax:
            return lines.undrawn
        if rows.steady is not None:
            return self._steady_uniforms(lines, rows, num_output)
        if lines.drawing is None:
            return self.seats.uniforms(lines.seats, num_output)
        drawn = lines.undrawn.copy()
        drawn[lines.drawing] = self.seats.uniforms(lines.seats[lines.drawing], num_output[lines.drawing])
        return drawn

    def _steady_uniforms(self, lines: Lines, rows: StepRows, num_output: I32) -> F32:
        """Of rows that come to their next tokens together."""
        ahead = rows.step - self._first_step
        if rows.steady is not self._steady or not 0 <= ahead < len(self._upcoming):
            self._upcoming = self.seats.upcoming(lines.seats, num_output)
            self._steady, self._first_step, ahead = rows.steady, rows.step, 0
        uniforms: F32 = self._upcoming[ahead]
        return uniforms

    def _make(self, rows: StepRows) -> Lines:
        row_set, counts = rows.row_set, np.array(rows.num_sampled, np.int32)
        self.seats.join(row_set)
        row_of = None if (counts == 1).all() else np.repeat(np.arange(len(counts)), counts)
        seats = row_set.seats.copy() if row_of is None else row_set.seats[row_of]
        requests = row_set.requests if row_of is None else tuple(row_set.requests[row] for row in row_of.tolist())
        forced = _forced(rows, counts)
        seats[list(forced)] = self.seats.scored
        numbers = self.seats.numbers(seats)
        numbers["num_logprobs"][list(forced)] = [num_prompt_logprobs(requests[line]) for line in forced]
        guided = [line for line, request in enumerate(requests) if request.guide is not None and line not in forced]
        special = forced.keys() | set(guided)
        return Lines(
            row_set=row_set,
            num_sampled=rows.num_sampled,
            row_of=row_of,
            requests=requests,
            forced=forced,
            guided=guided,
            guards=self.masks.guards([None if line in special else request for line, request in enumerate(requests)]),
            drawing=np.flatnonzero(seats != self.seats.scored) if forced else None,
            is_argmax=not numbers["temperature"].any(),
            seats=seats,
            unmasked=StepMasks(self.masks.none, np.full(len(requests), ALL, np.int32), 0),
            undrawn=np.zeros(len(requests), np.float32),
            numbers=numbers,
        )


def _forced(rows: StepRows, counts: I32) -> dict[int, int]:
    """The scored lines, each with the prompt token that it gives."""
    forced: dict[int, int] = {}
    first_lines = np.cumsum(counts) - counts
    first_tokens = rows.ends - counts + 1  # what a row's first line gives
    for row in np.flatnonzero((first_tokens < rows.row_set.num_prompts) & (counts > 0)).tolist():
        request, first = rows.requests[row], int(first_tokens[row])
        scored = request.tokens[first : min(int(rows.ends[row]) + 1, request.num_prompt)]
        forced.update(enumerate(scored, int(first_lines[row])))
    return forced

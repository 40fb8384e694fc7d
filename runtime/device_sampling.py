"""Sampling parameters → DeviceRows: a few numbers a line, and what a request's line of the state must hold (per step).

A request's line is its seat + 1, its own while it runs; the line after all of them is for scored tokens. A line is
written in the step that samples its request first, and anew after a preemption.
"""

from __future__ import annotations

import numpy as np

from ostinato.engines.io_table import BIAS_PAD, IN_PROMPT
from ostinato.engines.sizes import MAX_LOGIT_BIAS
from ostinato.plugins.sampling_rows import F32, I32

from .device_rows import DeviceRows, StateLine
from .request import Request
from .row_sets import StepRows
from .sampling_lines import Lines, LinesMaker


class DeviceSamplingPacker:
    """Makes DeviceRows. Arrays of one step may be shared with the next, so nobody writes to them."""

    def __init__(self, vocab_size: int, max_rows: int, num_kept: int) -> None:
        self._vocab_size = vocab_size
        self._maker = LinesMaker(vocab_size, max_rows, num_kept)
        self._arrivals = np.zeros(max_rows + 2, np.intp)  # whose content a line of the state has, as far as written
        self._may_hold_bias = np.zeros(max_rows + 2, np.bool_)
        self._lines: Lines | None = None
        self._same: DeviceRows | None = None  # of its steps in which nothing is drawn, masked or new
        self._state_rows: I32 = np.zeros(0, np.int32)

    def pack(self, rows: StepRows) -> DeviceRows:
        """One line per sampled position, in the order of the rows."""
        lines = self._maker.find(rows)
        num_output = lines.num_output(rows)
        joined: tuple[StateLine, ...] = ()
        if lines is not self._lines:
            self._lines, self._same = lines, None
            self._state_rows = (lines.seats + 1).astype(np.int32)
            joined = self._join(lines, num_output)
        masks = self._maker.step_masks(lines, rows, num_output)
        is_same = lines.is_argmax and masks is lines.unmasked and not joined
        if is_same and self._same is not None:
            return self._same
        packed = DeviceRows(
            self._maker.uniforms(lines, rows, num_output),
            state_rows=self._state_rows,
            mask_rows=masks.rows,
            masks=masks.masks,
            num_late_masks=masks.num_late,
            joined=joined,
            **lines.numbers,
        )
        if is_same:
            self._same = packed
        return packed

    def _join(self, lines: Lines, num_output: I32) -> tuple[StateLine, ...]:
        """What the lines of those must hold that were not sampled since they were seated."""
        arrivals = lines.of_rows(lines.row_set.arrivals)
        is_new = (self._arrivals[self._state_rows] != arrivals) & (lines.seats != self._maker.seats.scored)
        joined = []
        for at in np.flatnonzero(is_new).tolist():
            request, line = lines.requests[at], int(self._state_rows[at])
            assert num_output[at] == request.num_output, "a request joins with a token that is not known yet"
            self._arrivals[line] = arrivals[at]
            if (state := self._state_line(line, request)) is not None:
                joined.append(state)
        return tuple(joined)

    def _state_line(self, line: int, request: Request) -> StateLine | None:
        """None if the line's content does the request no harm.

        A line that has held a bias is never taken for empty again: whether the step that emptied it came to run is
        not known here, and an empty bias is soon written.
        """
        params = request.params
        counts = _counts(request, self._vocab_size) if params.has_penalties else None
        self._may_hold_bias[line] |= bool(params.logit_bias)
        if not self._may_hold_bias[line]:
            return None if counts is None else StateLine(line, None, None, counts)
        return StateLine(line, *_bias(request), counts)


def _counts(request: Request, vocab_size: int) -> I32:
    """Of each token [V], how often it is in the output, and whether in the prompt."""
    prompt, output = request.tokens[: request.num_prompt], request.tokens[request.num_prompt :]
    counts: I32 = np.bincount(np.array(output, np.int64), minlength=vocab_size).astype(np.int32)
    counts[prompt] |= IN_PROMPT
    return counts


def _bias(request: Request) -> tuple[I32, F32]:
    """Ids [M], ascending, and values [M]. Entries for the same token stay in order: they are added one by one."""
    entries = sorted(request.params.logit_bias, key=lambda entry: entry[0])
    ids = np.full(MAX_LOGIT_BIAS, BIAS_PAD, np.int32)
    values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    ids[: len(entries)] = [token_id for token_id, _ in entries]
    values[: len(entries)] = [value for _, value in entries]
    return ids, values

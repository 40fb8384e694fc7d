"""Sampling parameters → the lines of SamplingRows (runs per step; most of it only when the set of rows changes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ostinato.plugins.sampling_rows import F32, I32, SamplingRows

from .masks import ALL, StepMasks
from .request import Request, SamplingParams, TokenCounts
from .row_sets import StepRows
from .sampling_lines import Lines, LinesMaker
from .sampling_seats import SCORING

PAD_ID = -1  # in bias_ids


class SamplingPacker:
    """Makes SamplingRows. Arrays of one step may be shared with the next, so nobody writes to them.

    Counts are host arrays that follow `Request.tokens`, so a row with penalties is not fed from the step before.
    With `asks_guides_late` the masks of guided lines are made by `fill_masks`, which is called after each `pack`.
    """

    def __init__(self, vocab_size: int, max_rows: int, num_kept: int = 1, *, asks_guides_late: bool = False) -> None:
        self._vocab_size = vocab_size
        self._maker = LinesMaker(vocab_size, max_rows, num_kept)
        self._lines: Lines | None = None
        self._rows: SamplingRows
        self._counted: list[Request] = []
        self._asks_late = asks_guides_late
        self._unfilled: tuple[I32, Lines, I32] | None = None  # masks [S, W], whose they are, numbers of outputs [S]

    def pack(self, rows: StepRows) -> SamplingRows:
        """One line per sampled position, in the order of the rows."""
        lines = self._maker.find(rows)
        if lines is not self._lines:
            self._lines = lines
            self._counted = [
                request
                for line, request in enumerate(lines.requests)
                if request.params.has_penalties and line not in lines.forced
            ]
            for request in self._counted:
                self._start_counting(request)
            self._rows = _rows(lines)
        for request in self._counted:
            _count_outputs(request)
        self._unfilled = None
        num_output = lines.num_output(rows)
        masks = self._maker.step_masks(lines, rows, num_output, with_guides=not self._asks_late)
        assert not masks.num_late, "a guided row is fed from the step before, which the host's sampler can't take"
        allowed = _allowed(masks)
        if self._asks_late and lines.guided:
            if allowed is None:
                allowed = np.full((len(lines.requests), self._maker.masks.num_words), ALL, np.int32)
            self._unfilled = (allowed, lines, num_output)
        if lines.is_argmax and allowed is None:
            return self._rows
        return replace(self._rows, uniforms=self._maker.uniforms(lines, rows, num_output), allowed=allowed)

    @property
    def lacks_masks(self) -> bool:
        """Whether guides are still to be asked for the rows packed last."""
        return self._unfilled is not None

    def fill_masks(self) -> None:
        """Ask them."""
        if self._unfilled is None:
            return
        allowed, lines, num_output = self._unfilled
        self._unfilled = None
        requests = [lines.requests[line] for line in lines.guided]
        allowed[lines.guided] = self._maker.masks.guided(requests, num_output[lines.guided].tolist())

    def _start_counting(self, request: Request) -> None:
        if request.counts is None:
            prompt = np.bincount(request.tokens[: request.num_prompt], minlength=self._vocab_size)
            request.counts = TokenCounts(prompt.astype(np.int32), np.zeros(self._vocab_size, np.int32))


def _count_outputs(request: Request) -> None:
    """Bring the output counts up to the request's last token, in place."""
    counts = request.counts
    assert counts is not None, "counting was not started"
    for token_id in request.tokens[request.num_prompt + counts.num_counted :]:
        counts.output[token_id] += 1
    counts.num_counted = request.num_output


def _rows(lines: Lines) -> SamplingRows:
    """All but uniforms and masks."""
    params = [SCORING if line in lines.forced else request.params for line, request in enumerate(lines.requests)]
    counts = [r.counts if p.has_penalties else None for r, p in zip(lines.requests, params, strict=True)]
    bias_ids, bias_values = _bias(params)
    return SamplingRows(
        lines.undrawn,
        **lines.numbers,
        allowed=None,
        bias_ids=bias_ids,
        bias_values=bias_values,
        prompt_counts=[None if c is None else c.prompt for c in counts],
        output_counts=[None if c is None else c.output for c in counts],
    )


def _allowed(masks: StepMasks) -> I32 | None:
    """A mask a line, [S, W]; None if there is none."""
    if not len(masks.masks):
        return None
    allowed = np.full((len(masks.rows), masks.masks.shape[1]), ALL, np.int32)
    masked = masks.rows != ALL
    allowed[masked] = masks.masks[masks.rows[masked]]
    return allowed


def _bias(params: Sequence[SamplingParams]) -> tuple[I32, F32]:
    """Biased ids and their values, [S, M] padded to the row with the most."""
    width = max((len(p.logit_bias) for p in params), default=0)
    ids = np.full((len(params), width), PAD_ID, np.int32)
    values = np.zeros((len(params), width), np.float32)
    for line, p in enumerate(params):
        for entry, (token_id, value) in enumerate(p.logit_bias):
            ids[line, entry] = token_id
            values[line, entry] = value
    return ids, values

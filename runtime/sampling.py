"""Sampling parameters → the lines of SamplingRows (runs per step; most of it only when the set of rows changes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ostinato.plugins.philox import uniforms
from ostinato.plugins.sampling_rows import F32, I32, SamplingRows

from .plan import PlanRow
from .request import SEED_BITS, Request, SamplingParams, TokenCounts

WORD_BITS = 32  # of the `allowed` mask
NO_LOGPROBS = -1
PAD_ID = -1  # in bias_ids
DRAW_AHEAD = 16  # output tokens whose uniforms are drawn at once
SCORING = SamplingParams(temperature=0.0)  # a prompt token's logprob is the model's own, without bias and penalties

Words = NDArray[np.uint32]  # of one line's mask, [W]


class _Draws:
    """Uniforms of a set of lines, drawn ahead: a call costs nearly the same for many output tokens as for one."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._seeds = np.array([request.seed % 2**SEED_BITS for request in requests], np.uint64)
        self._choices = np.array([request.choice for request in requests], np.uint32)
        self._first = np.zeros(len(requests), np.uint32)
        self._drawn: list[F32] = []  # DRAW_AHEAD × [S], from output token `_first` on

    def at(self, indices: NDArray[np.uint32]) -> F32:
        """The uniform of each line's output token, [S]."""
        ahead = indices - self._first  # wraps where a line went back
        step = int(ahead[0])
        if step >= len(self._drawn) or (ahead != step).any():
            self._first, step = indices, 0
            many = (np.arange(DRAW_AHEAD, dtype=np.uint32)[:, None] + indices).ravel()
            drawn = uniforms(np.tile(self._seeds, DRAW_AHEAD), np.tile(self._choices, DRAW_AHEAD), many)
            self._drawn = list(drawn.reshape(DRAW_AHEAD, len(indices)))
        return self._drawn[step]


@dataclass(frozen=True, slots=True)
class _Lines:
    """What stays the same for a set of lines. A forced line gives a prompt token, whatever its logits."""

    requests: list[Request]
    forced: list[tuple[int, int]]  # (line, token)
    guarded: list[tuple[int, Request, Words]]  # lines whose stop ids are masked while min_tokens are not reached
    counted: list[Request]
    draws: _Draws | None  # None if every line is an argmax
    rows: SamplingRows


class SamplingPacker:
    """Makes SamplingRows. Arrays of one step may be shared with the next, so nobody writes to them."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // WORD_BITS)
        self._lines = self._make_lines([], [])

    def pack(self, rows: Sequence[PlanRow]) -> SamplingRows:
        """One line per sampled position, in the order of the rows."""
        requests: list[Request] = []
        forced: list[tuple[int, int]] = []
        for request, _, end, num_sampled in rows:
            for position in range(end - num_sampled, end):
                if position + 1 < len(request.tokens):
                    forced.append((len(requests), request.tokens[position + 1]))
                requests.append(request)
        if forced or self._lines.forced or requests != self._lines.requests:
            self._lines = self._make_lines(requests, forced)
        return self._refresh(self._lines)

    def _refresh(self, lines: _Lines) -> SamplingRows:
        """The parts that move with every output token."""
        for request in lines.counted:
            _count_outputs(request)
        guarded = [
            (line, words) for line, request, words in lines.guarded if request.num_output < request.params.min_tokens
        ]
        rows = lines.rows
        if lines.draws is None and not guarded and not lines.forced:
            return rows
        drawn = rows.uniforms
        if lines.draws is not None:
            drawn = lines.draws.at(np.array([request.num_output for request in lines.requests], np.uint32))
        allowed = self._mask(len(lines.requests), lines.forced, guarded) if guarded or lines.forced else None
        return replace(rows, uniforms=drawn, allowed=allowed)

    def _mask(self, count: int, forced: list[tuple[int, int]], guarded: list[tuple[int, Words]]) -> I32:
        """[S, W]: all tokens, but one in a forced line and no stop id in a guarded one."""
        mask = np.full((count, self._num_words), -1, np.int32)
        words = mask.view(np.uint32)
        for line, token_id in forced:
            words[line] = 0
            words[line, token_id // WORD_BITS] = 1 << token_id % WORD_BITS
        for line, unstopped in guarded:
            words[line] &= unstopped
        return mask

    def _without(self, ids: frozenset[int]) -> Words:
        """A mask of all tokens but `ids`, [W]."""
        words = np.full(self._num_words, -1, np.int32).view(np.uint32)
        at, bit = np.divmod(np.fromiter(ids, np.uint32, len(ids)), WORD_BITS)
        np.bitwise_and.at(words, at, ~(np.uint32(1) << bit.astype(np.uint32)))
        return words

    def _make_lines(self, requests: list[Request], forced: list[tuple[int, int]]) -> _Lines:
        params = [request.params for request in requests]
        num_logprobs = [p.logprobs for p in params]
        for line, _ in forced:
            num_logprobs[line] = params[line].prompt_logprobs
            params[line] = SCORING
        counted = [request for request, p in zip(requests, params, strict=True) if p.has_penalties]
        for request in counted:
            self._start_counting(request)
        counts = [request.counts if p.has_penalties else None for request, p in zip(requests, params, strict=True)]
        bias_ids, bias_values = _bias(params)
        return _Lines(
            requests=requests,
            forced=forced,
            guarded=[
                (line, request, self._without(request.stop_ids))
                for line, (request, p) in enumerate(zip(requests, params, strict=True))
                if p.min_tokens and request.stop_ids
            ],
            counted=counted,
            draws=_Draws(requests) if any(p.temperature > 0 for p in params) else None,
            rows=SamplingRows(
                uniforms=np.zeros(len(params), np.float32),
                temperature=np.array([p.temperature for p in params], np.float32),
                top_k=np.array([min(max(p.top_k, 0), self._vocab_size) for p in params], np.int32),
                top_p=np.array([p.top_p for p in params], np.float32),
                min_p=np.array([p.min_p for p in params], np.float32),
                repetition=np.array([p.repetition_penalty for p in params], np.float32),
                presence=np.array([p.presence_penalty for p in params], np.float32),
                frequency=np.array([p.frequency_penalty for p in params], np.float32),
                allowed=None,
                bias_ids=bias_ids,
                bias_values=bias_values,
                prompt_counts=[None if c is None else c.prompt for c in counts],
                output_counts=[None if c is None else c.output for c in counts],
                num_logprobs=np.array([NO_LOGPROBS if k is None else k for k in num_logprobs], np.int32),
            ),
        )

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

"""The host kernel for one row of FusedSampling: f32 passes over reused buffers, sorts of few candidates (per step).

Every step works on this row and this sampler's own buffers alone, so a row's result does not depend on its batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .fused_sampling import GREEDY_BELOW, NO_TOKEN
from .sampling_rows import F32, I32

_LINE = 256  # weights summed together in f32; line sums go on in float64
_GROUPS = 64  # token v belongs to group v % (V // 64) when the k best are looked for
_FEW = 4  # above V / 4 candidates, sorting all costs less than picking them out
_LIKELY = 2.0**-14  # a share of the mass that top-p seldom cuts under, with few tokens above it
_MARGIN = 0.5  # of a candidate bound, far above f32 rounding


@dataclass(frozen=True, slots=True)
class RowArguments:
    """One line of SamplingRows as plain numbers. `allowed` is flags [V] or None; counts are None where neutral."""

    uniform: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition: np.float32
    presence: np.float32
    frequency: np.float32
    allowed: NDArray[np.bool_] | None
    bias_ids: I32
    bias_values: F32
    prompt_counts: I32 | None
    output_counts: I32 | None
    num_logprobs: int


class RowSample(NamedTuple):
    """A row's token, -1 in error, with its logprob and its best ids and their logprobs; None where none were asked."""

    token: int
    logprob: float
    top_ids: NDArray[np.int64] | None
    top_logprobs: NDArray[np.float64] | None


class _Edge(NamedTuple):
    """Where truncation cuts: logits above `value` stay, and of those equal to it the first `ties`."""

    value: np.float32
    ties: int


class RowSampler:
    """Samples rows one after the other; owns the buffers, so one thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        padded = -(-vocab_size // _LINE) * _LINE
        self._vocab_size = vocab_size
        self._adjusted = np.empty(vocab_size, np.float32)
        self._masked = np.empty(vocab_size, np.float32)
        self._weights = np.empty(padded, np.float32)
        self._ranked = np.empty(vocab_size, np.float32)
        self._flags = np.empty(vocab_size, np.bool_)

    def sample(self, logits: F32, row: RowArguments) -> RowSample:
        """Sample one contiguous row [V]; the logits are not changed."""
        adjusted = self._adjust(logits, row)
        best = int(adjusted.argmax())  # the first NaN, if there is one
        if not math.isfinite(adjusted[best]):
            return _error(row)
        masked = adjusted
        if row.allowed is not None:
            masked = self._mask(adjusted, row.allowed)
            legal_best = int(masked.argmax())
            if masked[legal_best] == -np.inf:
                return _error(row)
        else:
            legal_best = best
        token = legal_best
        if row.temperature >= np.float32(GREEDY_BELOW) and row.top_k != 1:
            token = self._draw(masked, masked[legal_best], row)
        if row.num_logprobs < 0:
            return RowSample(token, math.nan, None, None)
        return self._report(adjusted, adjusted[best], token, row.num_logprobs)

    def _adjust(self, logits: F32, row: RowArguments) -> F32:
        """Bias and penalties, in the oracle's order of f32 operations; the logits themselves where there are none."""
        is_biased = row.bias_ids >= 0
        if not is_biased.any() and row.prompt_counts is None and row.output_counts is None:
            return logits
        adjusted = self._adjusted
        np.copyto(adjusted, logits)
        np.add.at(adjusted, row.bias_ids[is_biased], row.bias_values[is_biased])
        in_output = np.flatnonzero(row.output_counts > 0) if row.output_counts is not None else None
        if row.repetition != 1:
            seen = np.zeros(self._vocab_size, np.bool_)
            if in_output is not None:
                seen[in_output] = True
            if row.prompt_counts is not None:
                np.logical_or(seen, row.prompt_counts > 0, out=seen)
            ids = np.flatnonzero(seen)
            values = adjusted[ids]
            adjusted[ids] = np.where(values > 0, values / row.repetition, values * row.repetition)
        if in_output is not None and row.output_counts is not None:
            counts = row.output_counts[in_output].astype(np.float32)
            adjusted[in_output] = adjusted[in_output] - row.presence - row.frequency * counts
        return adjusted

    def _mask(self, logits: F32, allowed: NDArray[np.bool_]) -> F32:
        """-inf where not allowed, by passes whose cost does not hang on the mask's pattern."""
        masked = self._masked
        np.copyto(masked, allowed)
        masked -= 0.5
        masked *= np.inf  # now each token's upper limit: inf or -inf
        return np.minimum(logits, masked, out=masked)

    def _draw(self, logits: F32, greatest: np.float32, row: RowArguments) -> int:
        """The first id in vocabulary order whose cumulative kept mass exceeds the uniform's share of it."""
        top_k = row.top_k if 0 < row.top_k < self._vocab_size else 0
        if not top_k and row.top_p >= 1.0 and row.min_p <= 0.0:
            lines, sums = self._weigh(logits, greatest, row.temperature)
            return _crossing(lines, sums, row.uniform * float(sums[-1]), "right")
        edge = self._edge(logits, greatest, top_k, row)
        ids = np.flatnonzero(np.greater_equal(logits, edge.value, out=self._flags))
        kept = logits.take(ids)
        ties = np.flatnonzero(kept == edge.value)
        if len(ties) > edge.ties:
            ids, kept = np.delete(ids, ties[edge.ties :]), np.delete(kept, ties[edge.ties :])
        lines, sums = self._weigh(kept, greatest, row.temperature)
        return int(ids[_crossing(lines, sums, row.uniform * float(sums[-1]), "right")])

    def _edge(self, logits: F32, greatest: np.float32, top_k: int, row: RowArguments) -> _Edge:
        """The cut of top-k, top-p and min-p together; `top_k` 0 is off."""
        if top_k:
            ranked = self._largest(logits, top_k)
            lines, sums = self._weigh(ranked, greatest, row.temperature)
            target = row.top_p * float(sums[-1])
        elif row.top_p < 1.0:
            mass = float(self._weigh(logits, greatest, row.temperature)[1][-1])
            target = row.top_p * mass
            # What weighs less than (1 - p) * mass / V each amounts to less than 1 - p: the cut is never under it.
            sure = (1.0 - row.top_p) * mass / self._vocab_size
            ranked, lines, sums = self._weightiest(logits, greatest, max(_LIKELY * mass, sure), row.temperature)
            if sums[-1] <= target:
                ranked, lines, sums = self._weightiest(logits, greatest, sure, row.temperature)
        else:
            ranked, lines, sums = self._weightiest(logits, greatest, row.min_p, row.temperature)
            target = math.inf
        keep = len(ranked)
        if target < sums[-1]:  # not where top-p is off, nor where rounding left the candidates short of it: all stay
            keep = min(keep, _crossing(lines, sums, target, "left") + 1)
        if row.min_p > 0.0:
            keep = min(keep, int(np.count_nonzero(lines.reshape(-1)[:keep] >= np.float32(row.min_p))))
        value = ranked[keep - 1]
        return _Edge(value, keep - int(np.count_nonzero(ranked > value)))

    def _weightiest(
        self, logits: F32, greatest: np.float32, least: float, temperature: float
    ) -> tuple[F32, F32, NDArray[np.float64]]:
        """At least the logits whose weight reaches `least`, descending, and their weights as `_weigh` gives them."""
        bound = float(greatest) + temperature * math.log(least * _MARGIN)
        ranked = self._descending(logits, np.float32(bound))
        return ranked, *self._weigh(ranked, greatest, temperature)

    def _largest(self, values: F32, k: int) -> F32:
        """The k largest values, descending; a view of a buffer."""
        width = len(values) // _GROUPS
        if k > width:
            return self._descending(values, np.float32(-np.inf))[:k]
        # k groups whose greatest reaches the bound hold k values that do: nothing below it is among the k largest.
        greatest = values[: width * _GROUPS].reshape(_GROUPS, width).max(axis=0)
        return self._descending(values, np.partition(greatest, width - k)[width - k])[:k]

    def _descending(self, values: F32, bound: np.float32) -> F32:
        """At least the values that reach the bound, and the greatest, descending; a view of a buffer."""
        flags = np.greater_equal(values, bound, out=self._flags)
        count = int(np.count_nonzero(flags))
        some = values.take(np.flatnonzero(flags)) if count < len(values) // _FEW else values
        ranked = np.negative(some, out=self._ranked[: len(some)])
        ranked.sort()
        return np.negative(ranked, out=ranked)

    def _weigh(self, logits: F32, greatest: np.float32, temperature: float) -> tuple[F32, NDArray[np.float64]]:
        """exp((logit - greatest) / temperature) in lines of 256, zeros at the end, and the running sums of lines."""
        count = len(logits)
        weights = self._weights[: -(-count // _LINE) * _LINE]
        live = weights[:count]
        np.subtract(logits, greatest, out=live)
        if temperature != 1.0:
            np.divide(live, np.float32(temperature), out=live)
        np.exp(live, out=live)
        weights[count:] = 0.0
        lines = weights.reshape(-1, _LINE)
        # On short lines einsum takes half the time of sum(axis=1).
        return lines, np.cumsum(np.einsum("ij->i", lines), dtype=np.float64)

    def _report(self, adjusted: F32, greatest: np.float32, token: int, k: int) -> RowSample:
        """The token's logprob and the k best, of the distribution before mask and temperature."""
        _, sums = self._weigh(adjusted, greatest, 1.0)
        log_total = math.log(sums[-1])
        logprob = (float(adjusted[token]) - float(greatest)) - log_total
        if k == 0:
            return RowSample(token, logprob, None, None)
        edge = self._largest(adjusted, k)[-1]
        ids = np.flatnonzero(adjusted >= edge)
        values = adjusted[ids]
        order = np.argsort(-values, kind="stable")[:k]
        return RowSample(token, logprob, ids[order], (values[order].astype(np.float64) - float(greatest)) - log_total)


def _error(row: RowArguments) -> RowSample:
    if row.num_logprobs < 0:
        return RowSample(NO_TOKEN, math.nan, None, None)
    ids = np.full(row.num_logprobs, NO_TOKEN, np.int64)
    return RowSample(NO_TOKEN, -math.inf, ids, np.full(row.num_logprobs, -np.inf))


def _crossing(lines: F32, sums: NDArray[np.float64], target: float, side: Literal["left", "right"]) -> int:
    """Where the running sum of weights [n, 256] first exceeds `target` ("right") or reaches it ("left").

    `sums` are the running sums of whole lines, and the last of them is past the target.
    """
    line = int(np.searchsorted(sums, target, side=side))
    before = float(sums[line - 1]) if line else 0.0
    within = int(np.searchsorted(np.cumsum(lines[line], dtype=np.float64), target - before, side=side))
    if within == _LINE:  # the line's f32 sum was the greater by a rounding: its last weight it is
        within = int(np.flatnonzero(lines[line])[-1])
    return line * _LINE + within

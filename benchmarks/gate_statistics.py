"""What paired step times say about a regression: a ratio, its interval, a verdict (pure; per look of the latency gate).

A round is a short stretch in which both sides' steps alternate. Its ratio, new / base of the two medians, is free of
drift (both sides saw the same minute) and of lone spikes (medians). A pair is two processes; where a process' memory
happens to lie makes it a per cent or two faster or slower for as long as it lives, so that only other processes tell
more. The estimate is the mean over pairs of the 20% trimmed mean of their rounds' log ratios.

Its interval is the percentile bootstrap: pairs are drawn, and within each whole blocks of neighbouring rounds, which
are alike. A trimmed mean stands rounds in which another program took one side's turns, and is smooth, where a median's
bootstrap has lumps. BCa would correct for a skew that log ratios of like against like do not have, by a jackknife that
a handful of pairs makes noise of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
TRIM = 0.2  # of a pair's rounds, at each end
RESAMPLES = 4000
MIN_ROUNDS = 20  # with fewer the bootstrap's tails are too short to decide on
TAILS = 1.1  # what few blocks draw is spread too little, all the more where noise lasts: with this, ERROR holds
ERROR = 0.05  # chance that a change of just the budget is called a regression, over all looks together
Verdict = Literal["regression", "pass", "open"]


@dataclass(frozen=True)
class Interval:
    """`low` and `high` are one-sided bounds of the ratio, each wrong with probability `error`."""

    estimate: float
    low: float
    high: float
    error: float


def round_ratio(base: Sequence[float], new: Sequence[float]) -> float:
    """new / base of the medians of one round's step times."""
    return float(np.median(new) / np.median(base))


def error_per_look(num_looks: int) -> float:
    """An even share of `ERROR` for each look of a number that is fixed beforehand.

    The shares add up to it whatever the looks have to do with each other (Bonferroni): looking early is paid for with
    a wider interval at every look.
    """
    return ERROR / num_looks


def interval(pairs: Sequence[Sequence[float]], error: float = ERROR, seed: int = 0) -> Interval:
    """The estimate from each pair's round ratios, with its bounds."""
    source = np.random.default_rng(seed)
    logs = [np.log(np.asarray(ratios, np.float64)) for ratios in pairs]
    estimate = np.mean([_trimmed_means(one[None])[0] for one in logs])
    draws = np.stack([_drawn(one, source) for one in logs])  # [pairs, RESAMPLES]
    chosen = source.integers(len(logs), size=draws.shape)
    means = np.take_along_axis(draws, chosen, axis=0).mean(axis=0)
    low, high = np.quantile(means, (error, 1 - error))
    return Interval(math.exp(estimate), math.exp(low), math.exp(high), error)


def verdict(found: Interval, budget: float, *, is_last: bool) -> Verdict:
    """A regression if even the lower bound is beyond the budget; a pass if the upper one is not, or time is up."""
    if found.low > 1 + budget:
        return "regression"
    return "pass" if is_last or found.high < 1 + budget else "open"


def _trimmed_means(rows: F64) -> F64:
    """Each row's mean without its TRIM smallest and largest values."""
    cut = int(rows.shape[1] * TRIM)
    kept: F64 = np.sort(rows, axis=1)[:, cut : rows.shape[1] - cut]
    means: F64 = kept.mean(axis=1)
    return means


def _drawn(logs: F64, source: np.random.Generator) -> F64:
    """[RESAMPLES] estimates from blocks of neighbours drawn anew; the last round's neighbour is the first.

    A few blocks vary less around their mean than around the truth: m / (m - 1) makes up for it, as in a variance.
    """
    count = len(logs)
    length = max(1, round(count**0.5))
    num_blocks = -(-count // length)
    starts = source.integers(count, size=(RESAMPLES, num_blocks, 1))
    indices = ((starts + np.arange(length)) % count).reshape(RESAMPLES, -1)[:, :count]
    means, center = _trimmed_means(logs[indices]), _trimmed_means(logs[None])
    drawn: F64 = center + (means - center) * math.sqrt(num_blocks / max(1, num_blocks - 1)) * TAILS
    return drawn

"""A latency over the last minutes, in bins of a few seconds, for the console's charts (a value costs one count)."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

BIN_SECONDS = 5.0
NUM_BINS = 60
_STEPS_PER_OCTAVE = 8  # so that a quantile is at most 9% off
_SHORTEST = 1e-6


class Point(NamedTuple):
    """One bin: how long ago it began, its values, and two quantiles in seconds."""

    age: float
    num_values: int
    p50: float
    p99: float


class LatencySeries:
    """Counts by bin and by size. One thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._bins: deque[tuple[int, Counter[int]]] = deque(maxlen=NUM_BINS)

    def observe(self, seconds: float, count: int = 1) -> None:
        index = int(self._now() // BIN_SECONDS)
        if not self._bins or self._bins[-1][0] != index:
            self._bins.append((index, Counter()))
        self._bins[-1][1][_size(seconds)] += count

    def points(self) -> list[Point]:
        """Bins that had values, oldest first."""
        now = self._now()
        oldest = int(now // BIN_SECONDS) - NUM_BINS
        return [
            Point(now - index * BIN_SECONDS, counts.total(), _quantile(counts, 0.5), _quantile(counts, 0.99))
            for index, counts in self._bins
            if index > oldest
        ]


class Latencies:
    """The two series that a caller of a stream feels."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.first_token = LatencySeries(now)
        self.between_tokens = LatencySeries(now)


def _size(seconds: float) -> int:
    return round(math.log2(max(seconds, _SHORTEST)) * _STEPS_PER_OCTAVE)


def _quantile(counts: Counter[int], part: float) -> float:
    """The smallest value that `part` of all do not exceed, to half a step."""
    rank = math.ceil(part * counts.total())
    for size in sorted(counts):
        rank -= counts[size]
        if rank <= 0:
            return float(2 ** (size / _STEPS_PER_OCTAVE))
    raise AssertionError("a bin without values")

"""A Prometheus histogram that one thread fills: a value costs a search and two additions (lines run per step)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """Counts of values by upper bound, which a value may equal; the last count is of those past every bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def observe_all(self, values: ArrayLike) -> None:
        """Many at once, which costs a tenth each."""
        places = np.searchsorted(self._bounds, values)
        for place, count in enumerate(np.bincount(places, minlength=len(self._counts)).tolist()):
            self._counts[place] += count
        self._sum += float(np.sum(values))

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """(bound, values up to it) for each bound and for infinity, and the sum of the values."""
        total, found = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            found.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
        return found, self._sum


class Tallies(Collector):
    """One family of tallies by the value of its label, all known from the start; "": a single one, without a label."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], label: str = "", values: Sequence[str] = ("",)
    ) -> None:
        self.by_value = {value: Tally(bounds) for value in values}
        self._name, self._text, self._label = name, text, label

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label] if self._label else [])
        for value, tally in self.by_value.items():
            buckets, total = tally.buckets()
            family.add_metric([value] if self._label else [], buckets, total)
        yield family

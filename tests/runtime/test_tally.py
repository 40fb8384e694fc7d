"""The histogram, beside prometheus_client's own."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from ostinato.runtime.tally import Tallies

BOUNDS = (0.001, 0.5, 1.0, 2.5, 7680.0)


def page(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@pytest.mark.parametrize("label", ["", "span"])
def test_it_says_what_the_librarys_says(label: str) -> None:
    chance = random.Random(3)
    mine, theirs = CollectorRegistry(), CollectorRegistry()
    values = ["a", "b"] if label else [""]
    tallies = Tallies("x:y_seconds", "What it is.", BOUNDS, label, values)
    mine.register(tallies)
    theirs_of = Histogram("x:y_seconds", "What it is.", [label] if label else [], registry=theirs, buckets=BOUNDS)
    for value in values:
        other = theirs_of.labels(value) if label else theirs_of
        for seconds in [*BOUNDS, 0.0, 9999.0, *(chance.expovariate(1) for _ in range(500))]:
            tallies.by_value[value].observe(seconds)
            other.observe(seconds)
    assert page(mine) == page(theirs)

"""Synthetic requests for benchmarks: seeded prompts of plain words and Poisson arrival times (made once per run)."""

from __future__ import annotations

import random
from dataclasses import dataclass

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
)
WORDS = _TEXT.split()


@dataclass(frozen=True)
class Arrival:
    """One request: seconds after the start that it is sent, its prompt, and the tokens it asks for."""

    at: float
    prompt: str
    max_tokens: int


def poisson_arrivals(count: int, rate: float, input_words: int, output_tokens: int, seed: int) -> list[Arrival]:
    """`rate` requests a second on average; an infinite rate sends all at once. Prompts share no prefix."""
    source = random.Random(seed)
    at, arrivals = 0.0, []
    for _ in range(count):
        at += 0.0 if rate == float("inf") else source.expovariate(rate)
        arrivals.append(Arrival(at, " ".join(source.choices(WORDS, k=input_words)), output_tokens))
    return arrivals

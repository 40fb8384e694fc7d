"""Takes turns between the two sides of the latency gate: rounds of alternating steps, pairs, a verdict (per run).

Steps alternate base new new base, which also cancels what changes evenly within the four; the side that begins changes
from round to round. Both sides decode the same prompts at the same length, since step time grows with context.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from gate_statistics import MIN_ROUNDS, Interval, Verdict, error_per_look, interval, round_ratio, verdict
from workload import WORDS

WARM_STEPS = 8
SLACK_STEPS = 16  # a stream runs a step ahead where a token shows no text by itself


class Askable(Protocol):
    """A side, whoever answers for it."""

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]: ...


OpenPair = Callable[[int], AbstractContextManager[tuple[Askable, Askable]]]  # pair number → base and new, warm


@dataclass(frozen=True)
class Shape:
    """What is measured: rows decoded together, words a prompt, and how steps make up rounds and rounds a prompt."""

    rows: int = 1
    words: int = 48
    burst: int = 1  # steps a turn
    turns: int = 8  # fours a round
    rounds: int = 4  # a prompt
    clock: str = "wall"

    @property
    def max_tokens(self) -> int:
        return WARM_STEPS + self.rounds * self.turns * 2 * self.burst * 2 + SLACK_STEPS


@dataclass(frozen=True)
class Plan:
    """How long and how sure: `pairs` of processes share `seconds` evenly, and so do the looks, the last at the end."""

    budget: float
    seconds: float
    pairs: int
    seed: int = 0
    num_looks: int = 5

    def looks_due(self, elapsed: float) -> int:
        """How many looks but the last have come."""
        return min(self.num_looks - 1, int(elapsed / self.seconds * self.num_looks))

    def may_look(self, num_rounds: list[int]) -> bool:
        """One pair can't tell what its processes' memory does, so a look waits for a second, if there is one."""
        full = sum(count >= MIN_ROUNDS for count in num_rounds)
        return full >= min(2, self.pairs)


@dataclass
class Pair:
    """What two processes gave: step times of each round, base's and new's, and times to first token."""

    steps: list[tuple[list[float], list[float]]] = field(default_factory=list)
    ttfts: list[tuple[float, float]] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [round_ratio(base, new) for base, new in self.steps]

    @property
    def ttft_ratios(self) -> list[float]:
        return [new / base for base, new in self.ttfts]


@dataclass
class Measured:
    """What came of it all."""

    pairs: list[Pair] = field(default_factory=list)
    looks: list[Interval] = field(default_factory=list)
    verdict: Verdict = "open"

    def look(self, plan: Plan, *, is_last: bool = False) -> Verdict:
        """Judge what there is so far."""
        found = interval([pair.ratios for pair in self.pairs], error_per_look(plan.num_looks), plan.seed)
        self.looks.append(found)
        self.verdict = verdict(found, plan.budget, is_last=is_last)
        return self.verdict

    def medians(self) -> tuple[float, float]:
        """Median step time of base and of new, over everything."""
        base, new = (
            statistics.median(t for pair in self.pairs for s in pair.steps for t in s[side]) for side in (0, 1)
        )
        return base, new

    def ttft_medians(self) -> tuple[float, float]:
        base, new = (statistics.median(ttft[side] for pair in self.pairs for ttft in pair.ttfts) for side in (0, 1))
        return base, new


def measure(
    open_pair: OpenPair,
    shape: Shape,
    plan: Plan,
    progress: Callable[[Measured], None] = lambda measured: None,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Rounds of one pair after the other until a look decides or all have had their turn."""
    measured, source, started, num_done = Measured(), random.Random(plan.seed), clock(), 0
    for number in range(plan.pairs):
        pair = Pair()
        measured.pairs.append(pair)
        with open_pair(number) as (base, new):
            for _ in rounds(base, new, shape, source, pair):
                progress(measured)
                elapsed = clock() - started
                if plan.looks_due(elapsed) > num_done and plan.may_look([len(one.steps) for one in measured.pairs]):
                    num_done = plan.looks_due(elapsed)
                    if measured.look(plan) != "open":
                        return measured
                if elapsed >= plan.seconds * (number + 1) / plan.pairs and len(pair.steps) >= MIN_ROUNDS:
                    break
    measured.look(plan, is_last=True)
    return measured


def rounds(base: Askable, new: Askable, shape: Shape, source: random.Random, pair: Pair) -> Iterator[None]:
    """Rounds without end, each written into `pair`."""
    order = [base, new]
    while True:
        prompts = [" ".join(source.choices(WORDS, k=shape.words)) for _ in range(shape.rows)]
        ttft = {id(side): _start(side, prompts, shape) for side in order}
        pair.ttfts.append((ttft[id(base)], ttft[id(new)]))
        for _ in range(shape.rounds):
            times: dict[int, list[float]] = {id(base): [], id(new): []}
            first, second = order
            for side in (first, second, second, first) * shape.turns:
                times[id(side)] += side.ask("decode", steps=shape.burst)[shape.clock]
            pair.steps.append((times[id(base)], times[id(new)]))
            order.reverse()
            yield
        if shape.rounds % 2 == 0:  # the next prompt begins with the other side
            order.reverse()


def _start(side: Askable, prompts: list[str], shape: Shape) -> float:
    (ttft,) = side.ask("prompt", prompts=prompts, max_tokens=shape.max_tokens)[shape.clock]
    side.ask("decode", steps=WARM_STEPS)
    return float(ttft)

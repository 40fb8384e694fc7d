"""The last steps: what each held and computed, and where its time went (a line is added per step)."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ostinato.engines.sizes import Limits

from .executor import StepRules
from .flight import StepTimes

NUM_STEPS = 1024


class StepRecord(NamedTuple):
    """One step. `computed`: its tokens with the pads that the executor added. `bucket`: what it is shown under.

    Where steps are padded the two mostly are the same; where they are not, `bucket` only groups steps of about a size.
    """

    number: int
    times: StepTimes
    computed: int
    bucket: int

    @property
    def padding(self) -> int:
        """Tokens computed that belonged to nobody."""
        return self.computed - self.times.num_tokens


class StepLog:
    """A ring. Added to on the loop's thread; `last` may be called on any."""

    def __init__(self, limits: Limits, rules: StepRules, num_steps: int = NUM_STEPS) -> None:
        self._buckets, self._computed = limits.token_buckets, rules.computed_tokens
        self._ring: deque[tuple[int, StepTimes]] = deque(maxlen=num_steps)
        self._number = 0

    def add(self, times: StepTimes) -> None:
        """A step has landed."""
        self._number += 1
        self._ring.append((self._number, times))

    @property
    def num_steps(self) -> int:
        """Of all time."""
        return self._number

    def last(self, count: int = NUM_STEPS) -> list[StepRecord]:
        """The last `count` steps, the oldest first."""
        steps = list(self._ring)  # one call, so that no step comes in between
        return [self._record(number, times) for number, times in steps[max(0, len(steps) - count) :]]

    def _record(self, number: int, times: StepTimes) -> StepRecord:
        computed = self._computed(times.num_rows, times.num_tokens, times.num_sampled)
        # A GPU's shapes are the bundle's, which may be larger than what the limits now allow.
        bucket = next((bucket for bucket in self._buckets if bucket >= computed), computed)
        return StepRecord(number, times, computed, bucket)

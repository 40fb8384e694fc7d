"""The last steps: what each held, the bucket that it ran in, and where its time went (a line is added per step)."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ostinato.engines.sizes import Limits, bucket_for

from .flight import StepTimes

NUM_STEPS = 1024


class StepRecord(NamedTuple):
    """One step. `bucket`: tokens that it was padded up to."""

    number: int
    times: StepTimes
    bucket: int

    @property
    def padding(self) -> int:
        """Tokens of the bucket that belonged to nobody."""
        return self.bucket - self.times.num_tokens


class StepLog:
    """A ring. Added to on the loop's thread; `last` may be called on any."""

    def __init__(self, limits: Limits, num_steps: int = NUM_STEPS) -> None:
        self._limits = limits
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
        limits = self._limits
        pads = bucket_for(times.num_rows, limits.row_buckets) - times.num_rows
        bucket = bucket_for(min(times.num_tokens + pads, limits.max_step_tokens), limits.token_buckets)
        return StepRecord(number, times, bucket)

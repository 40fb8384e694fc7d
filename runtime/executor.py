"""The one seam between desk and machine: an executor runs batches and hands back tickets (called per step)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ostinato.plugins.sampling_rows import I32, Sampled

from .batch import Batch
from .graphs import Coverage

LogitsObserver = Callable[[NDArray[np.float32]], None]  # sees [num_sampled, V] of each step; the array is reused


def as_they_are(num_rows: int, num_tokens: int, num_sampled: int) -> int:
    """The tokens of a step that nothing pads."""
    return num_tokens


@dataclass(frozen=True)
class StepRules:
    """What an executor asks of steps; the desk plans and packs by it.

    `pad_tokens[n]`: tokens that it pads a step of n rows with, of the step's budget. `computed_tokens(rows, tokens,
    sampled)`: what such a step computes with all its pads; asked by who looks, not per step. `num_in_flight`: steps
    that run or wait on the device at once. `feeds_tokens`: a row's input may be the token that the step before it
    samples, which the host does not know yet. `keeps_state`: it samples on the device and wants `DeviceRows`, else
    `SamplingRows`. `samples_in_wait`: it reads masks no sooner than its ticket is waited for, so that guides may fill
    them in while the step runs.
    """

    pad_tokens: Sequence[int]
    computed_tokens: Callable[[int, int, int], int] = as_they_are
    num_in_flight: int = 1
    feeds_tokens: bool = False
    keeps_state: bool = False
    samples_in_wait: bool = False


class Ticket(Protocol):
    """A step in flight."""

    def sample(self, masks: I32) -> None:
        """Give the masks that were not known when the step was launched, [num_late_masks, W], and let it go on.

        Called once, before `wait`, and only where the batch has late masks. Raises DeviceError.
        """
        ...

    def wait(self) -> Sampled:
        """Block until the step is done; raises DeviceError if it failed. Called once, in the order of the steps."""
        ...


class Executor(Protocol):
    """Runs batches in the order they come, `rules.num_in_flight` at once. Owns the KV caches."""

    @property
    def rules(self) -> StepRules: ...

    @property
    def trouble(self) -> str | None:
        """Why it will never run a step again, or None. May be read from any thread."""
        ...

    @property
    def coverage(self) -> Coverage | None:
        """What it replayed so far; None if it does not replay."""
        ...

    def run(self, batch: Batch) -> Ticket:
        """Launch a step; of one with late masks, what comes before sampling. The batch's arrays may be reused after.

        Raises DeviceError; then nothing of the step counts, and steps before it go on.
        """
        ...

    def close(self) -> None: ...

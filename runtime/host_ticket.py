"""A step in flight on a CPU: its executor finishes it when it is waited for (made per step)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ostinato.plugins.sampling_rows import I32, Sampled

from .batch import Batch


class Finishes(Protocol):
    """An executor with one step in flight, on the CPU's own threads."""

    def finish(self, batch: Batch) -> Sampled:
        """Wait for the running step and sample its rows. Raises DeviceError."""
        ...


@dataclass(frozen=True, slots=True)
class HostTicket:
    """The ticket of an executor that samples on the host, in `wait`."""

    executor: Finishes
    batch: Batch

    def sample(self, masks: I32) -> None:
        raise AssertionError(f"{len(masks)} late masks: on the CPU nothing is in flight when a step is packed")

    def wait(self) -> Sampled:
        return self.executor.finish(self.batch)

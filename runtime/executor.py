"""The one seam between desk and machine: an executor runs a batch and hands back a ticket (called per step)."""

from __future__ import annotations

from typing import Protocol

from ostinato.plugins.sampling_rows import Sampled

from .batch import Batch


class Ticket(Protocol):
    """A running step."""

    def wait(self) -> Sampled:
        """Block until the step is done; raises DeviceError if it failed. Called exactly once."""
        ...


class Executor(Protocol):
    """Runs batches, one at a time, in the order they come. Owns the KV caches."""

    def run(self, batch: Batch) -> Ticket: ...

    def close(self) -> None: ...

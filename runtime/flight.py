"""A step on its way: launched, perhaps waiting for masks, then landed (made per step)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ostinato.plugins.sampling_rows import Sampled

from .batch import Packer
from .device_rows import DeviceRows
from .executor import Executor, Ticket
from .plan import Plan


class StepTimes(NamedTuple):
    """What a step held, and the seconds that its parts took on the loop's thread."""

    num_rows: int
    num_tokens: int
    plan: float
    pack: float
    launch: float
    wait: float
    commit: float


class Flight:
    """A planned step. `error`: why it will give nothing, known before it lands."""

    __slots__ = (
        "_launch_seconds",
        "_pack_seconds",
        "_plan_seconds",
        "_ticket",
        "_wait_seconds",
        "_wants_masks",
        "error",
        "plan",
    )

    def __init__(self, plan: Plan, plan_seconds: float) -> None:
        self.plan = plan
        self.error: Exception | None = None
        self._ticket: Ticket | None = None
        self._wants_masks = False
        self._plan_seconds = plan_seconds
        self._pack_seconds = self._launch_seconds = self._wait_seconds = 0.0

    def launch(self, packer: Packer, executor: Executor, clock: Callable[[], float]) -> None:
        """Pack it and hand it to the executor; raises what they raise."""
        started = clock()
        batch = packer.pack(self.plan)
        packed = clock()
        self._ticket = executor.run(batch)
        sampling = batch.sampling
        self._wants_masks = isinstance(sampling, DeviceRows) and sampling.num_late_masks > 0
        self._pack_seconds, self._launch_seconds = packed - started, clock() - packed

    def sample(self, packer: Packer, clock: Callable[[], float]) -> None:
        """Give the masks that it still wants, now that the step before it is committed."""
        if not self._wants_masks or self.error is not None:
            return
        assert self._ticket is not None, "a step that was not launched wants masks"
        self._wants_masks = False
        started = clock()
        self._ticket.sample(packer.late_masks(self.plan))
        self._launch_seconds += clock() - started

    def wait(self, clock: Callable[[], float]) -> Sampled:
        """What it sampled; raises `error`, or what made it fail."""
        if self.error is not None:
            raise self.error
        assert self._ticket is not None, "a step that was not launched has no end"
        started = clock()
        sampled = self._ticket.wait()
        self._wait_seconds = clock() - started
        return sampled

    def times(self, commit_seconds: float) -> StepTimes:
        plan = self.plan
        spans = (self._plan_seconds, self._pack_seconds, self._launch_seconds, self._wait_seconds, commit_seconds)
        return StepTimes(plan.num_rows, plan.num_tokens, *spans)

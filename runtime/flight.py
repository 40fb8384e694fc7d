"""A step on its way: launched, perhaps waiting for masks, then landed (made per step)."""

from __future__ import annotations

from typing import NamedTuple

from ostinato.plugins.sampling_rows import Sampled

from .batch import Packer
from .device_rows import DeviceRows
from .executor import Executor, Ticket
from .plan import Plan
from .timeline import LoopClock


class StepTimes(NamedTuple):
    """What a step held, and the seconds that its parts took on the loop's thread; moments are of its clock.

    `grammar`: masks and guides since the step before landed; none of it is in the other parts.
    """

    num_rows: int
    num_tokens: int
    num_sampled: int
    launched_at: float
    landed_at: float
    plan: float
    pack: float
    launch: float
    wait: float
    commit: float
    grammar: float


class Flight:
    """A planned step. `error`: why it will give nothing, known before it lands."""

    __slots__ = (
        "_launch_seconds",
        "_launched_at",
        "_pack_seconds",
        "_plan_seconds",
        "_ticket",
        "_wants_masks",
        "error",
        "plan",
    )

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.error: Exception | None = None
        self._ticket: Ticket | None = None
        self._wants_masks = False
        self._plan_seconds = self._pack_seconds = self._launch_seconds = self._launched_at = 0.0

    def launch(self, packer: Packer, executor: Executor, clock: LoopClock) -> None:
        """Pack it and hand it to the executor; raises what they raise."""
        self._plan_seconds = clock.enter("pack")
        batch = packer.pack(self.plan)
        self._pack_seconds = clock.enter("launch")
        self._ticket = executor.run(batch)
        sampling = batch.sampling
        self._wants_masks = isinstance(sampling, DeviceRows) and sampling.num_late_masks > 0
        self._launch_seconds = clock.enter("grammar" if packer.lacks_masks else "plan")
        self._launched_at = clock.entered_at
        if packer.lacks_masks:  # the step runs meanwhile
            packer.fill_masks()
            clock.enter("plan")

    def sample(self, packer: Packer, clock: LoopClock) -> None:
        """Give the masks that it still wants, now that the step before it is committed."""
        if not self._wants_masks or self.error is not None:
            return
        assert self._ticket is not None, "a step that was not launched wants masks"
        self._wants_masks = False
        clock.enter("grammar")
        masks = packer.late_masks(self.plan)
        clock.enter("launch")
        self._ticket.sample(masks)
        self._launch_seconds += clock.enter("commit")

    def wait(self) -> Sampled:
        """What it sampled; raises `error`, or what made it fail."""
        if self.error is not None:
            raise self.error
        assert self._ticket is not None, "a step that was not launched has no end"
        return self._ticket.wait()

    def times(self, wait: float, commit: float, grammar: float, landed_at: float) -> StepTimes:
        plan = self.plan
        return StepTimes(
            plan.num_rows, plan.num_tokens, plan.num_sampled, self._launched_at, landed_at,
            self._plan_seconds, self._pack_seconds, self._launch_seconds, wait, commit, grammar,
        )  # fmt: skip

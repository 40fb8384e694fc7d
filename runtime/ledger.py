"""What is kept of calls and steps that are over: in metrics, in rings, as traces (added to per step and per call)."""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.engines.sizes import Limits

from .call import Call
from .executor import StepRules
from .flight import StepTimes
from .metrics import Metrics
from .otel import Tracer
from .recent import Recent
from .step_log import StepLog


class Ledger:
    """`note_step` runs on the loop's thread, all else on the asyncio thread. `tracer` None: no traces are sent."""

    def __init__(self, metrics: Metrics, limits: Limits, rules: StepRules) -> None:
        self.recent = Recent()
        self.steps = StepLog(limits, rules)
        self.tracer: Tracer | None = None
        self._metrics = metrics

    def note_call(self, call: Call, route: str, head: Iterable[tuple[bytes, bytes]]) -> None:
        """A call's answer is out. `head`: the fields that it came with."""
        record = call.record(route)
        self.recent.add(record)
        self._metrics.count_call(record)
        if self.tracer is not None:
            self.tracer.export(record, head)

    def note_step(self, times: StepTimes) -> None:
        """A step has landed."""
        self.steps.add(times)
        self._metrics.iteration_tokens.observe(times.num_tokens)

    def close(self) -> None:
        """Send what is left to send; takes a while."""
        if self.tracer is not None:
            self.tracer.close()

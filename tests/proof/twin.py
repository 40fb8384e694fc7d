"""An executor whose every step runs again on a second one, alone: results must be the same bits (in tests)."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

from ostinato.plugins.sampling_rows import I32, Sampled
from ostinato.runtime.batch import Batch
from ostinato.runtime.executor import Executor, StepRules, Ticket
from tests.proof.kept import check_same_bits


class Twin:
    """`first` runs as the loop asks; `second` runs a step when it is waited for. `live_counts`: of decode steps."""

    trouble: str | None = None
    coverage = None

    def __init__(self, first: Executor, second: Executor) -> None:
        self._first, self._second = first, second
        self.live_counts: Counter[int] = Counter()
        self.seen: Counter[str] = Counter()

    @property
    def rules(self) -> StepRules:
        return self._first.rules

    def run(self, batch: Batch) -> TwinTicket:
        if batch.num_rows == batch.num_tokens == batch.num_sampled:
            self.live_counts[batch.num_rows] += 1
        self.seen["fed"] += batch.feed_rows is not None
        return TwinTicket(self, deepcopy(batch), self._first.run(batch))

    def again(self, batch: Batch, masks: I32 | None) -> Sampled:
        ticket = self._second.run(batch)
        if masks is not None:
            self.seen["late masks"] += 1
            ticket.sample(masks)
        return ticket.wait()

    def close(self) -> None:
        self._first.close()
        self._second.close()


class TwinTicket:
    def __init__(self, twin: Twin, batch: Batch, ticket: Ticket) -> None:
        self._twin, self._batch, self._ticket = twin, batch, ticket
        self._masks: I32 | None = None

    def sample(self, masks: I32) -> None:
        self._masks = masks.copy()
        self._ticket.sample(masks)

    def wait(self) -> Sampled:
        found = self._ticket.wait()
        wanted = self._twin.again(self._batch, self._masks)
        check_same_bits(found, wanted)
        return found

"""A model that says one phrase again and again, at a pace that a browser's page can follow (runs per step)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ostinato.plugins.sampling_rows import I32, Sampled
from ostinato.runtime.batch import Batch
from ostinato.runtime.executor import StepRules
from tests.fakes import MANY_ROWS, sampled_on_host
from tests.serving import VOCAB_SIZE

PHRASE = b"do re mi fa <b>sol</b> la & ti. "


class PhraseLM:
    """Says one phrase again and again after any prompt, a token every `pace` seconds. `is_bad`: steps fail."""

    def __init__(self) -> None:
        self.rules = StepRules([0] * MANY_ROWS)
        self.trouble: str | None = None
        self.coverage = None
        self.pace = 0.01
        self.is_bad = False

    def run(self, batch: Batch) -> _PacedTicket:
        if self.is_bad:
            raise RuntimeError("a step failed")
        logits = np.zeros((batch.num_sampled, VOCAB_SIZE), np.float32)
        for line, place in enumerate(batch.positions[batch.logits_indices].tolist()):
            logits[line, PHRASE[place % len(PHRASE)]] = 40.0
        return _PacedTicket(sampled_on_host(logits, batch), self.pace)

    def close(self) -> None: ...


@dataclass(frozen=True)
class _PacedTicket:
    sampled: Sampled
    pace: float

    def sample(self, masks: I32) -> None:
        raise AssertionError("no row has a grammar")

    def wait(self) -> Sampled:
        time.sleep(self.pace)
        return self.sampled

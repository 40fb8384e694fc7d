"""One small load with some of everything, served on a device that orders its work as a seed says (made per test)."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from tests.overlap_requests import Band, make, random_orders
from tests.proof.kept import Kept
from tests.proof.poison import poison_machine
from tests.proof.tiny_proof import LIMITS, graphs

ORDERS = random_orders(random.Random(141), 7)
TIGHT = replace(LIMITS, max_rows=4, row_buckets=(1, 2, 4), kv_tokens=44, max_context=44)  # some are preempted


def served(path: Path, seed: int | None) -> Band:
    """The load joins in two waves; at the end nothing is left. What is found wrong is raised."""
    machine = graphs(path, seed=seed, limits=TIGHT)
    poison_machine(machine, TIGHT)
    executor = Kept(machine.executor)
    band = Band(TIGHT, executor)
    for number, order in enumerate(ORDERS):
        band.submit(make(number, order, TIGHT))
        if number == len(ORDERS) // 2:
            band.step()
    band.run()
    executor.close()
    errors = [event.error for events in band.events.values() for event in events if event.error is not None]
    assert not errors, errors
    assert machine.rank.driver.alive() == []
    return band

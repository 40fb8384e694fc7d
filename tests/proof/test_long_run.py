"""Thousands of steps of everything at once: what graphs replay, two in flight, is what runs alone and eagerly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ostinato.runtime.request import Request, SamplingParams
from tests.fakes import make_request
from tests.proof.crowd import Crowd, check_same, plain
from tests.proof.poison import poison_machine
from tests.proof.tiny_proof import LIMITS, Machine, OneAtATime, eager, graphs, proof_bundle
from tests.proof.twin import Twin
from tests.scale import scaled

NUM_STEPS = {"rtx": scaled(300, 8_000), "trt": scaled(100, 2_000)}
KINDS = (
    *("stop", "length", "abort", "guided", "scored", "penalized", "biased", "min_tokens", "logprobs"),
    *("chosen again", "hits", "late masks"),
)
LOGPROB_TOLERANCE = 1e-5  # between steps of other sizes, whose attention sums in another order


def owner_of_the_last_block(crowd: Crowd) -> Request:
    """A request fills and registers the pool's last block; another one shares it, and so it stays."""
    pages = crowd.band.pages
    pages._blank.append(pages._blank.pop(0))
    prompt = list(range(LIMITS.block_size + 1))
    params = SamplingParams(temperature=0.0, max_tokens=1)
    crowd.band.submit(make_request(-1, prompt, params, LIMITS))
    crowd.band.run()
    owner = make_request(-2, prompt, params, LIMITS)
    assert pages.admit(owner)
    assert owner.blocks[0] == LIMITS.num_blocks - 1
    assert owner.num_computed == LIMITS.block_size
    return owner


def caches(machine: Machine, block: int) -> bytes:
    buffers = machine.executor._rank.buffers
    found = []
    for place in buffers.layout.blocks["cache"].places.values():
        size = place.num_bytes // place.shape[0]
        address = buffers.address("cache") + place.offset + block * size
        found.append(machine.rank.driver.memory.bytes_at(address, size, "the test").tobytes())
    return b"".join(found)


@pytest.mark.parametrize("target", ["rtx", "trt"])
def test_replayed_and_overlapped_is_eager_and_alone(target: str, tmp_path: Path) -> None:
    path = proof_bundle(tmp_path, target)
    replayed, again, alone = graphs(path), eager(path), eager(path, OneAtATime)
    poison_machine(replayed, LIMITS)
    driver, device = replayed.rank.driver, replayed.executor._rank.device
    num_allocations, free = driver.num_allocations, device.memory().free
    twin = Twin(replayed.executor, again.executor)
    crowd = Crowd(LIMITS, twin, 11, NUM_STEPS[target])
    owner = owner_of_the_last_block(crowd)
    kept = caches(replayed, LIMITS.num_blocks - 1)

    crowd.run()

    assert caches(replayed, LIMITS.num_blocks - 1) == kept
    assert np.frombuffer(kept, np.float32).all()
    crowd.band.pages.release(owner)
    crowd.band.check_idle()
    assert (driver.num_allocations, device.memory().free) == (num_allocations, free)
    check_same(crowd, plain(LIMITS, alone.executor, crowd), LOGPROB_TOLERANCE)
    check_that_it_saw_all(crowd, twin, replayed, least={"rtx": 5, "trt": 1}[target])
    for machine in (replayed, again, alone):
        machine.executor.close()
        assert machine.rank.driver.alive() == []


def check_that_it_saw_all(crowd: Crowd, twin: Twin, machine: Machine, least: int) -> None:
    """Else the test is empty."""
    coverage, seen = machine.executor.coverage, crowd.seen() + twin.seen
    assert not coverage.eager
    assert set(coverage.replayed) >= {f"decode {bucket}" for bucket in LIMITS.row_buckets}
    assert set(twin.live_counts) == set(range(1, LIMITS.max_rows + 1)), twin.live_counts
    assert seen["fed"] > crowd.num_steps // 2, seen
    assert seen["preempted"] > 0, seen
    assert all(seen[name] >= least for name in KINDS), seen

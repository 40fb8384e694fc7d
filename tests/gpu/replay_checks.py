"""Captured steps of the made-up rank against eager ones and against what they must compute (in tests)."""

from __future__ import annotations

from pathlib import Path

from tests.sim.toy import SHAPES, expected, random_steps, same

from .gpu import Gpu
from .toy_on_gpu import GpuToyRank, poisoned


def check_replay(gpu: Gpu, folder: Path, seed: int, count: int) -> None:
    """Replays equal eager steps and the expected numbers to the bit, caches too; nothing is allocated on the way."""
    steps = poisoned(random_steps(seed, count), seed)
    eager = GpuToyRank(gpu, folder, captures=False)
    wanted, cache = eager.run(steps), eager.caches()
    eager.close()
    assert same(wanted, expected(steps)), "eager steps are wrong"
    rank = GpuToyRank(gpu, folder, captures=True)
    assert not rank.graphs.failures
    rank.run(steps[:4])
    rank.buffers.clear(rank.stream)
    free = rank.device.memory().free
    found = rank.run(steps)
    assert rank.device.memory().free >= free, "something was allocated while serving"
    assert same(found, wanted), "a replay is not what the eager step was"
    assert rank.caches() == cache
    assert rank.graphs.coverage.replayed.total() == count + min(4, count)
    assert not rank.graphs.coverage.eager
    assert {step.shape for step in steps} == set(SHAPES) or count < 20
    rank.close()

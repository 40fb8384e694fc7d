"""A decoder with torch between our kernels: captured and replayed, to the bit what eager steps give (in tests)."""

from __future__ import annotations

from tests.sim.toy import same

from .gpu import Gpu
from .stack_program import StackSizes
from .stack_rank import StackRank
from .stack_steps import random_steps


def check_stack(gpu: Gpu, stack: StackSizes, seed: int, count: int) -> dict[str, int]:
    """Random steps, two in flight, some fed from the step before; returns each graph's bytes on the GPU."""
    steps = random_steps(stack, seed, count)
    eager = StackRank(gpu, stack, captures=False)
    wanted = eager.run(steps)
    eager.close()
    assert all((one["tokens"] >= 0).all() for one in wanted), "a row has no legal token: the numbers are broken"
    rank = StackRank(gpu, stack, captures=True)
    assert not rank.graphs.failures
    free = rank.device.memory().free
    found = rank.run(steps)
    assert rank.device.memory().free >= free, "something was allocated while serving"
    assert same(found, wanted), "a replay is not what the eager step was"
    memory = dict(rank.graphs.memory)
    rank.close()
    return memory

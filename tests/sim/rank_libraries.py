"""The simulated libraries of one rank of a bundle, made in whichever process the rank lives in."""

from __future__ import annotations

from ostinato.runtime.libraries import Libraries
from ostinato.runtime.rank import RankParts, RankSetup

from .nccl import SimNccl
from .sim_bundle import simulated


def simulated_libraries(setup: RankSetup) -> Libraries:
    rank = simulated(setup.bundle.path, rank=setup.rank, limits=setup.limits)
    nccl = SimNccl(rank.driver)
    rank.tensorrt.collective = nccl.collective
    return rank.libraries(nccl)


SIMULATED_PARTS = RankParts(libraries=simulated_libraries)

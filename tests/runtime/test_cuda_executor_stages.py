"""Two pipeline stages, each an executor of its own: what one sends is what the other computes with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ostinato.engines.shards import Shards
from ostinato.plugins.sampling_rows import Sampled
from ostinato.runtime.batch import Batch, Packer
from ostinato.runtime.cuda import Stream
from ostinato.runtime.cuda_executor import CudaExecutor, CudaTicket
from ostinato.runtime.executor import StepRules
from ostinato.runtime.loop import Loop
from ostinato.runtime.pages import Pages
from ostinato.runtime.request import SamplingParams
from ostinato.runtime.scheduler import Scheduler
from tests.bundles import random_prompts
from tests.sim.driver import SimDriver
from tests.sim.sim_bundle import SimulatedRank, simulated
from tests.sim.standin_builds import tiny_bundle
from tests.sim_desk import SimDesk, silent, sim_desk

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
PROMPTS = random_prompts(8, [3, 20, 1, 70])


@dataclass
class HandOver:
    """The link of both stages: what was sent lies on the host until it is received. One step at a time."""

    driver: SimDriver
    sent: list[tuple[int, str, Any]] = field(default_factory=list)
    communicator: int = 0

    def send(self, source: int, count: int, dtype: str, stream: Stream) -> None:
        stream.wait("what is sent")
        self.sent.append((count, dtype, self.driver.memory.view(source, dtype, (count,)).copy()))

    def receive(self, target: int, count: int, dtype: str, stream: Stream) -> None:
        stream.wait("what came before")
        sent_count, sent_dtype, numbers = self.sent.pop(0)
        assert (sent_count, sent_dtype) == (count, dtype)
        self.driver.memory.view(target, dtype, (count,))[:] = numbers

    def all_reduce(self, source: int, target: int, count: int, dtype: str, stream: Stream) -> None:
        raise AssertionError("there is one slice a stage")

    def all_gather(self, source: int, target: int, count: int, dtype: str, stream: Stream) -> None:
        raise AssertionError("there is one slice a stage")

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Stages:
    """Both stages as one executor, one after the other."""

    trouble = None
    coverage = None

    def __init__(self, first: CudaExecutor, last: CudaExecutor) -> None:
        self._first, self._last = first, last
        self.rules: StepRules = replace(last.rules, num_in_flight=1)

    def run(self, batch: Batch) -> CudaTicket:
        ahead = self._first.run(batch)
        nothing = ahead.wait()
        assert isinstance(nothing, Sampled)
        assert len(nothing.tokens) == 0
        return self._last.run(batch)

    def close(self) -> None:
        self._first.close()
        self._last.close()


@pytest.fixture
def stages(tmp_path: Path) -> tuple[Path, list[SimulatedRank], Stages]:
    tiny_bundle(tmp_path, shards=Shards(pipeline_parallel=2))
    ranks = [simulated(tmp_path / "bundle", rank=rank) for rank in range(2)]
    hand_over = HandOver(ranks[0].driver)
    executors = []
    for number, rank in enumerate(ranks):
        link = hand_over if number == 0 else replace(hand_over, driver=rank.driver)
        executors.append(
            CudaExecutor(
                rank.bundle,
                rank.bundle.manifest.limits,
                rank=number,
                libraries=rank.libraries(),
                links=link,
                progress=silent,
            )
        )
    return tmp_path, ranks, Stages(*executors)


def test_two_stages_give_what_one_rank_gives(
    stages: tuple[Path, list[SimulatedRank], Stages], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, ranks, both = stages
    assert both.rules.num_in_flight == 1
    rules = both._last.rules
    assert (rules.num_in_flight, rules.feeds_tokens, rules.keeps_state) == (2, False, True)
    limits = ranks[0].bundle.manifest.limits
    packer = Packer(limits, ranks[0].bundle.manifest.sizes.vocab_size, both.rules)
    loop = Loop(Scheduler(limits, Pages(limits, prefix_caching=False), both.rules), packer, both)
    found = SimDesk(ranks[0], limits, both._first, loop).tokens(PROMPTS, GREEDY)
    both.close()
    assert all(rank.driver.alive() == [] for rank in ranks)
    whole = tmp_path_factory.mktemp("whole")
    (whole / "checkpoint").symlink_to(folder / "checkpoint")
    tiny_bundle(whole)
    with sim_desk(simulated(whole / "bundle")) as desk:
        assert found == desk.tokens(PROMPTS, GREEDY)

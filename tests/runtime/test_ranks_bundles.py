"""Bundles of two ranks in processes of their own, on simulated GPUs: the tokens of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ostinato.engines.shards import Shards
from ostinato.runtime.batch import Packer
from ostinato.runtime.loop import Loop
from ostinato.runtime.pages import Pages
from ostinato.runtime.ranks import RanksExecutor
from ostinato.runtime.request import Event, Request, SamplingParams
from ostinato.runtime.scheduler import Scheduler
from tests.bundles import random_prompts
from tests.scale import scaled
from tests.sim.rank_libraries import SIMULATED_PARTS
from tests.sim.sim_bundle import simulated
from tests.sim.standin_builds import tiny_bundle
from tests.sim_desk import Parity, silent, sim_desk

from .test_ranks import ROOT, closing

pytestmark = pytest.mark.xdist_group("ranks")

PROMPTS = random_prompts(4, [3, 9, 30, 70, 5])
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, frequency_penalty=0.5, logit_bias=((5, 1.5),), max_tokens=5, logprobs=2
)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Desk:
    """A loop over all ranks of a bundle."""

    def __init__(self, folder: Path, target: str, shards: Shards) -> None:
        bundle = tiny_bundle(folder, target, shards=shards)
        limits = bundle.manifest.limits
        self.executor = RanksExecutor(bundle, limits, parts=SIMULATED_PARTS, stall_s=60.0, progress=silent)
        rules = self.executor.rules
        packer = Packer(limits, bundle.manifest.sizes.vocab_size, rules)
        self.loop = Loop(Scheduler(limits, Pages(limits, prefix_caching=False), rules), packer, self.executor)

    def run(self, requests: Sequence[Request]) -> list[Event]:
        for request in requests:
            self.loop.submit(request)
        return [event for events in self.loop.run_until_idle() for event in events]


def all_requests() -> list[Request]:
    """Greedy, sampled and guided ones."""
    requests = [
        Request(place, list(prompt), len(prompt), params, params.max_tokens or 8, seed=100 + place)
        for place, (prompt, params) in enumerate(zip(PROMPTS, (GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY), strict=True))
    ]
    requests[-1].guide = Parity()
    return requests


def outputs(requests: Sequence[Request], events: Sequence[Event]) -> list[list[int]]:
    assert not [event.error for event in events if event.error is not None]
    return [request.tokens[request.num_prompt :] for request in requests]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What one rank says."""
    folder = tmp_path_factory.mktemp("one")
    tiny_bundle(folder, "rtx")
    requests = all_requests()
    with sim_desk(simulated(folder / "bundle")) as desk:
        return outputs(requests, desk.run(requests))


CASES = [("rtx", Shards(2, 1)), ("rtx", Shards(1, 2)), ("trt", Shards(2, 1)), ("trt", Shards(1, 2))]


@pytest.mark.parametrize(("target", "shards"), CASES[: scaled(2, 4)], ids=str)
def test_ranks_say_what_one_says(tmp_path: Path, wanted: list[list[int]], target: str, shards: Shards) -> None:
    desk = Desk(tmp_path, target, shards)
    with closing(desk.executor) as ranks:
        assert ranks.rules.num_in_flight == 2
        requests = all_requests()
        assert outputs(requests, desk.run(requests)) == wanted
        assert ranks.trouble is None

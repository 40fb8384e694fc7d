"""Bundles on the simulated device: what they register, whole steps within fences, kernels bodies and interpreted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ostinato.engines.program import EngineCall
from ostinato.runtime.request import SamplingParams

from ..bundles import random_prompts
from ..scale import scaled
from ..sim_desk import SimDesk, sim_desk
from .memory import SimError
from .sim_bundle import SimulatedRank, fence, kernel_forms, simulated
from .standin_builds import TINY_LIMITS, tiny_bundle

FEW = replace(TINY_LIMITS, max_rows=2, max_step_tokens=16, row_buckets=(1, 2), token_buckets=(1, 2, 16))
PROMPTS = random_prompts(3, [3, 9, 1, 17, 30])
PARAMS = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4, logprobs=3)


@pytest.fixture(scope="module", params=["rtx", "trt"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target: str = request.param
    return tiny_bundle(tmp_path_factory.mktemp(target), target).path


def fenced(desk: SimDesk, rank: SimulatedRank) -> SimDesk:
    fence(rank, desk.executor._rank.buffers)
    return desk


def test_a_bundle_is_registered_whole(path: Path) -> None:
    rank = simulated(path)
    engines = {call.engine for call in rank.program.calls if isinstance(call, EngineCall)}
    assert engines == {info.file for info in rank.bundle.manifest.engines[0]}
    assert all(rank.tensorrt.spec((path / "rank0" / file).read_bytes()) for file in engines)
    cubins = list((path / "rank0" / "kernels").rglob("*.cubin"))
    assert cubins
    assert all(rank.driver.kernels.at(cubin.read_bytes()) for cubin in cubins)
    assert rank.driver.capability == (12, 0)


def test_a_bundle_s_kernels_are_those_that_sizes_alone_tell_of(tmp_path: Path) -> None:
    """Even where float32 rounds the attention's scale, which is one of their constants."""
    rank = simulated(tiny_bundle(tmp_path, "rtx", model="qwen3", overrides={"head_dim": 32}, limits=FEW).path)
    forms = kernel_forms(rank.bundle.manifest, 0, FEW)
    assert all(forms.keys() == infos.keys() for infos in rank.program.kernels.values())


def test_steps_stay_within_their_buffers_in_any_order(path: Path) -> None:
    outcomes = []
    for seed in (None, *range(scaled(2, 20))):
        rank = simulated(path, seed=seed)
        with sim_desk(rank) as desk:
            outcomes.append(fenced(desk, rank).tokens(PROMPTS, PARAMS))
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_a_buffer_that_is_too_small_shows(path: Path) -> None:
    """One whose fence is drawn too narrow, as if the layout were wrong."""
    rank = simulated(path)

    def serve() -> None:
        with sim_desk(rank) as desk:
            place = fenced(desk, rank).executor._rank.buffers.address("cache")
            rank.driver.memory.block(place, 1, "the test").fences[place] -= 4
            desk.tokens(PROMPTS[:1], PARAMS)

    with pytest.raises(SimError, match="reach out of their buffer"):
        serve()


def test_the_real_kernels_do_the_same_in_the_interpreter(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One short request, token by token and logprob by logprob, to what float32 leaves."""
    path = tiny_bundle(tmp_path_factory.mktemp("interpreted"), "rtx", limits=FEW).path
    found = []
    for interpreted in (False, True):
        rank = simulated(path, interpreted=interpreted)
        with sim_desk(rank) as desk:
            fenced(desk, rank)
            events = desk.run(desk.requests(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=2, logprobs=2)))
            found.append([(event.token_id, event.logprob.logprob) for event in events if event.logprob])
    bodies, kernels = found
    assert [token for token, _ in bodies] == [token for token, _ in kernels]
    np.testing.assert_allclose([value for _, value in bodies], [value for _, value in kernels], atol=1e-4)

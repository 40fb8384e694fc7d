"""Bugs planted on purpose: comparing tokens over random orders of the device's work finds each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.runtime.batch import Batch
from ostinato.runtime.buffers import StepSlot
from ostinato.runtime.cuda import Stream
from ostinato.runtime.cuda_executor import CudaExecutor
from ostinato.runtime.device_rows import DeviceRows
from ostinato.runtime.request import SamplingParams
from ostinato.runtime.step_inputs import StepInputs
from tests.bundles import random_prompts
from tests.scale import scaled
from tests.sim.memory import SimError
from tests.sim.sim_bundle import simulated
from tests.sim.standin_builds import TINY_LIMITS, tiny_bundle
from tests.sim_desk import Parity, open_desk

PROMPTS = random_prompts(9, [3, 9, 20])
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
Plant = Callable[[pytest.MonkeyPatch], None]


def reuse_staging_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both steps in flight share one block, and nobody waits until it has gone up."""
    launch = CudaExecutor._launch

    def into_the_first(executor: CudaExecutor, ticket: Any, batch: Batch) -> None:
        ticket.slot, ticket.inputs = executor._rank.buffers.slots[0], executor._rank.inputs[0][ticket.shape]
        launch(executor, ticket, batch)

    monkeypatch.setattr(CudaExecutor, "_launch", into_the_first)
    monkeypatch.setattr(StepSlot, "fill", lambda slot, shape: slot._inputs[shape.key])


def miss_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling does not wait for the masks that come up on the other stream."""
    monkeypatch.setattr(Stream, "after", lambda stream, event: None)


def write_pads_into_a_live_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pad row has a token, and its slot is the first of block 1."""
    fill = StepInputs.fill

    def spoiled(inputs: StepInputs, batch: Batch, sampling: DeviceRows) -> int:
        lines = fill(inputs, batch, sampling)
        num_rows, num_tokens = batch.num_rows, batch.num_tokens
        if num_tokens == num_rows:
            slots = next(target for name, target, _ in inputs._tokens if name == "slot_mapping")
            slots[num_tokens:] = TINY_LIMITS.block_size
            pads = len(inputs._starts) - num_rows - 1
            inputs._starts[num_rows + 1 :] = np.minimum(num_tokens + 1 + np.arange(pads), len(slots))
        return lines

    monkeypatch.setattr(StepInputs, "fill", spoiled)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rtx")
    tiny_bundle(folder)
    return folder / "bundle"


def outcome(path: Path, seed: int | None) -> Any:
    """Tokens of each request, the first one guided; or what the device found wrong."""
    desk = open_desk(simulated(path, seed=seed))
    requests = desk.requests(PROMPTS, GREEDY)
    requests[0].guide = Parity()
    try:
        events = desk.run(requests)
    except SimError as error:
        return str(error)
    if errors := [str(event.error) for event in events if event.error is not None]:
        return errors
    desk.executor.close()
    return [request.tokens[request.num_prompt :] for request in requests]


@pytest.mark.parametrize("plant", [reuse_staging_too_early, miss_an_event, write_pads_into_a_live_block])
def test_a_planted_bug_is_found(path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    seeds = (None, *range(scaled(2, 50)))
    wanted = outcome(path, None)
    assert all(outcome(path, seed) == wanted for seed in seeds)
    plant(monkeypatch)
    assert any(outcome(path, seed) != wanted for seed in seeds)

"""B73: a backend that fails in silence at step 5 of 10, for a batch of 4: never a token of that step."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda.bindings.driver import CUresult as Status

from ostinato.engines.program import EngineCall
from ostinato.runtime.request import STEP_FAILED, SamplingParams
from tests.fakes import make_request
from tests.overlap_requests import Band
from tests.proof.tiny_proof import LIMITS, Machine, eager, graphs, proof_bundle

PROMPTS = [[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3]]
NUM_STEPS, BAD_STEP = 10, 5
PARAMS = [SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_STEPS) for seed in range(4)]


@pytest.fixture(params=["rtx", "trt"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return proof_bundle(tmp_path, request.param)


def served(band: Band, first_id: int) -> None:
    band.submit(*(make_request(first_id + at, PROMPTS[at], PARAMS[at], LIMITS) for at in range(4)))
    band.run()


def check(machine: Machine, path: Path) -> None:
    """The batch of 4 fails at step 5, the next one is right, everything is given back."""
    control = graphs(path)
    whole = Band(LIMITS, control.executor)
    served(whole, 0)
    control.executor.close()
    band = Band(LIMITS, machine.executor)
    served(band, 0)
    for number in range(4):
        assert band.token_ids(number) == whole.token_ids(number)[: BAD_STEP - 1]
        last = band.events[number][-1]
        assert last.finish == "error"
        assert last.error is not None
        assert last.error.code == STEP_FAILED, last.error
    served(band, 10)  # the blocks were freed, which `run` looks at
    assert [band.token_ids(10 + at) for at in range(4)] == [whole.token_ids(at) for at in range(4)]
    assert machine.executor.trouble is None
    machine.executor.close()
    assert machine.rank.driver.alive() == []


def engines(machine: Machine) -> int:
    """That a step runs."""
    return sum(isinstance(call, EngineCall) for call in machine.rank.program.calls)


def test_false_from_enqueue(path: Path) -> None:
    machine = eager(path)
    tensorrt = machine.rank.tensorrt
    tensorrt.faults.refused = {tensorrt.num_enqueues + BAD_STEP * engines(machine)}
    check(machine, path)


def test_false_from_the_launch_of_a_graph(path: Path) -> None:
    """What a replayed step has in its place."""
    machine = graphs(path)
    launch, parts = machine.rank.driver.calls, len(machine.executor._rank.program.parts)
    driver, refused = machine.rank.driver, launch["cuGraphLaunch"] + BAD_STEP * parts
    plain = driver.faults.status

    def status(number: int, name: str) -> Status | None:
        if name == "cuGraphLaunch" and driver.calls[name] == refused:
            return Status.CUDA_ERROR_UNKNOWN
        return plain(number, name)

    driver.faults.status = status  # type: ignore[method-assign]
    check(machine, path)


def test_logits_that_are_no_numbers(tmp_path: Path) -> None:
    path = proof_bundle(tmp_path, "rtx")
    machine = graphs(path)
    tensorrt = machine.rank.tensorrt
    tensorrt.faults.nan = {tensorrt.num_runs + BAD_STEP * engines(machine)}
    check(machine, path)


def test_garbage_is_in_no_prefix(tmp_path: Path) -> None:
    """A prompt whose first step gave NaN is asked again: it must not be served from the blocks of that step."""
    machine = graphs(proof_bundle(tmp_path, "rtx"))
    tensorrt, band, prompt = machine.rank.tensorrt, Band(LIMITS, machine.executor), list(range(10))
    tensorrt.faults.nan = set(range(tensorrt.num_runs + 1, tensorrt.num_runs + 1 + engines(machine)))
    for number in range(2):
        band.submit(make_request(number, prompt, PARAMS[0], LIMITS))
        band.run()
    machine.executor.close()
    assert [band.finish(number) for number in range(2)] == ["error", "length"]

"""What goes wrong on a GPU, at any call: named in one line or overcome, nothing is left, the next request is right."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings.driver import CUresult as Status

from ostinato.engines.errors import DeviceError, OstinatoError
from ostinato.engines.sizes import Limits
from ostinato.runtime.cuda_executor import CudaExecutor
from ostinato.runtime.request import STEP_FAILED, Event, Request, SamplingParams
from tests.bundles import random_prompts
from tests.scale import scaled
from tests.sim.sim_bundle import SimulatedRank, simulated
from tests.sim.standin_builds import tiny_bundle
from tests.sim_desk import Parity, SimDesk, open_desk, silent, sim_desk

TARGETS = ("rtx", "trt")
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, logit_bias=((7, 1.5),))
PROMPTS = random_prompts(4, [3, 9, 20])
LIMITS = Limits(8, 3, 16, 40, 80, (1, 2, 3), (16,))  # fewer shapes to capture: fewer calls to fail


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {target: tmp_path_factory.mktemp(target) for target in TARGETS}
    for target, folder in folders.items():
        tiny_bundle(folder, target, limits=LIMITS)
    return {target: folder / "bundle" for target, folder in folders.items()}


@pytest.fixture(params=TARGETS)
def path(request: pytest.FixtureRequest, bundles: dict[str, Path]) -> Path:
    return bundles[request.param]


def wanted_tokens(path: Path) -> list[list[int]]:
    with sim_desk(simulated(path)) as desk:
        return desk.tokens(PROMPTS, GREEDY)


def guided(desk: SimDesk, first_id: int) -> list[Request]:
    """The first row's masks come late."""
    requests = desk.requests(PROMPTS, GREEDY, first_id)
    requests[0].guide = Parity()
    return requests


def one_line(told: str) -> bool:
    return bool(told) and "\n" not in told


def start(rank: SimulatedRank, *, is_strict: bool = False) -> CudaExecutor:
    return CudaExecutor(
        rank.bundle, rank.bundle.manifest.limits, libraries=rank.libraries(), is_strict=is_strict, progress=silent
    )


def calls_of(rank: SimulatedRank) -> int:
    """How many calls a start takes."""
    start(rank).close()
    return rank.driver.calls.total()


def spread(count: int, usual: int) -> Iterator[int]:
    """Numbers from 1 to `count`: some of them, or in a soak all."""
    return iter(range(1, count + 1, max(1, count // scaled(usual, count))))


def test_any_call_may_fail_at_start(path: Path) -> None:
    count = calls_of(simulated(path))
    wanted = wanted_tokens(path)
    outcomes = {"refused": 0, "served": 0}
    for number in spread(count, 8):
        rank = simulated(path)
        rank.driver.faults.at[number] = Status.CUDA_ERROR_OUT_OF_MEMORY
        try:
            executor = start(rank)
        except OstinatoError as error:
            outcomes["refused"] += 1
            told = str(error)
        else:
            outcomes["served"] += 1
            told = "it was served"
            rank.driver.faults.at.clear()
            executor.close()
        assert one_line(told), number
        assert rank.driver.alive() == [], number
    assert all(outcomes.values()), outcomes  # a failed capture is overcome
    assert wanted == wanted_tokens(path)


def failed(events: list[Event]) -> dict[int, str]:
    return {event.request_id: str(event.error) for event in events if event.error is not None}


def test_any_call_may_fail_in_a_step(path: Path) -> None:
    """One call at a time, on the same device all along: rows of a step end, or none do, and the next are right."""
    rank = simulated(path)
    with sim_desk(rank) as desk:
        before = rank.driver.calls.total()
        requests = guided(desk, 0)
        assert not failed(desk.run(requests))
        wanted = [request.tokens[request.num_prompt :] for request in requests]
        count = rank.driver.calls.total() - before
        num_failed = 0
        for number in spread(count, 10):
            rank.driver.faults.at = {rank.driver.calls.total() + number: Status.CUDA_ERROR_UNKNOWN}
            requests = guided(desk, 1000 * number)
            events = desk.run(requests)
            rank.driver.faults.at.clear()
            errors = failed(events)
            num_failed += bool(errors)
            assert all("\n" not in error for error in errors.values()), number
            assert all(event.error.code == STEP_FAILED for event in events if event.error is not None)
            for place, request in enumerate(requests):
                if request.id not in errors:
                    assert request.tokens[request.num_prompt :] == wanted[place], number
            assert desk.executor.trouble is None, number
            assert not failed(desk.run(again := guided(desk, 1000 * number + 500))), number
            assert [request.tokens[request.num_prompt :] for request in again] == wanted, number
            assert desk.loop.scheduler.pages.num_free == desk.loop.scheduler.pages.num_total, number
        assert num_failed > count // 4 // max(1, count // scaled(10, count))


def test_a_lost_context_ends_every_request_and_is_told(path: Path) -> None:
    rank = simulated(path)
    desk = open_desk(rank)
    rank.driver.faults.lost_at = rank.driver.calls.total() + 25
    events = desk.run(desk.requests(PROMPTS, GREEDY))
    assert len(failed(events)) == len(PROMPTS)
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE" in str(desk.executor.trouble)
    again = desk.run(desk.requests(PROMPTS, GREEDY, 10))
    assert len(failed(again)) == len(PROMPTS)
    desk.executor.close()  # what a lost context does not take back goes with it
    assert rank.driver.alive() == []


def test_a_hung_kernel_ends_in_trouble(bundles: dict[str, Path]) -> None:
    rank = simulated(bundles["rtx"])
    clock = rank.driver.clock
    hasty = replace(rank.libraries(), sleep=lambda seconds: clock.sleep(max(seconds, 0.5)))  # fewer polls
    desk = open_desk(rank, libraries=hasty)
    rank.driver.slow["segment_01"] = inf
    events = desk.run(desk.requests(PROMPTS, GREEDY))
    assert len(failed(events)) == len(PROMPTS)
    assert "the GPU hangs" in str(desk.executor.trouble)
    began = clock.now()
    desk.executor.close()  # gives up, and says so in the log
    assert clock.now() - began < 10  # whoever stops the server does not wait long


@pytest.mark.parametrize("call", ["cuStreamBeginCapture", "cuGraphInstantiate", "cuGraphUpload"])
def test_a_failed_capture_is_named_and_served_eagerly_bit_for_bit(
    path: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What has no graph runs all the same."""
    wanted = wanted_tokens(path)
    rank = simulated(path)
    rank.driver.faults.calls[call] = Status.CUDA_ERROR_OUT_OF_MEMORY
    with caplog.at_level(logging.WARNING), sim_desk(rank) as desk:
        assert "decode 2 is not captured, its steps run eagerly" in caplog.text
        assert call in caplog.text
        rank.driver.faults.calls.clear()
        assert desk.tokens(PROMPTS, GREEDY) == wanted
        coverage = desk.executor.coverage
        assert not coverage.replayed
        assert all(call in reason for _, reason in coverage.eager)
    rank.driver.faults.calls[call] = Status.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match="can't be captured, and graphs are strict"):
        start(rank, is_strict=True)
    assert rank.driver.alive() == []


def before_each(monkeypatch: pytest.MonkeyPatch, rank: SimulatedRank, name: str, then: Callable[[], None]) -> None:
    """Have something happen before each call of that name."""
    plain = getattr(rank.driver, name)

    def call(*given: Any) -> Any:
        then()
        return plain(*given)

    call.__name__ = name
    monkeypatch.setattr(rank.driver, name, call)


def test_any_call_may_fail_while_a_graph_is_captured(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape runs eagerly, all others as ever."""
    wanted = wanted_tokens(path)
    rank = simulated(path)
    begins: list[int] = []
    before_each(monkeypatch, rank, "cuStreamBeginCapture", lambda: begins.append(rank.driver.calls.total()))
    start(rank).close()
    first, second = begins[:2] if path.parent.name.startswith("trt") else begins[:3:2]
    for number in range(first + 1, second + 1, max(1, (second - first) // scaled(3, 1000))):
        rank = simulated(path)
        rank.driver.faults.at[number] = Status.CUDA_ERROR_UNKNOWN
        try:
            desk = open_desk(rank)
        except DeviceError as error:  # a first run, which is not captured
            told = str(error)
        else:
            rank.driver.faults.at.clear()
            (told,) = desk.executor._rank.graphs.failures.values() or ("no part of a capture",)
            assert desk.tokens(PROMPTS, GREEDY) == wanted
            desk.executor.close()
        assert one_line(told)
        assert rank.driver.alive() == []


def test_another_thread_may_allocate_while_graphs_are_captured(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures are of this thread alone."""
    rank = simulated(bundles["rtx"])
    _, context = rank.driver.cuDevicePrimaryCtxRetain(0)
    statuses: list[Status] = []

    def allocate() -> None:
        rank.driver.cuCtxSetCurrent(context)
        status, address = rank.driver.cuMemAlloc(64)
        statuses.append(status)
        rank.driver.cuMemFree(address)

    def meanwhile() -> None:
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()

    before_each(monkeypatch, rank, "cuStreamEndCapture", meanwhile)
    desk = open_desk(rank)
    assert set(statuses) == {Status.CUDA_SUCCESS}
    assert not desk.executor._rank.graphs.failures
    assert desk.tokens(PROMPTS, GREEDY) == wanted_tokens(bundles["rtx"])
    desk.executor.close()
    assert rank.driver.alive() == ["context"]  # ours


def test_an_engine_that_answers_false_ends_its_step_only(path: Path) -> None:
    """Nothing of the step is served, and the reason is TensorRT's own."""
    wanted = wanted_tokens(path)
    rank = simulated(path)
    rank.driver.faults.calls["cuStreamBeginCapture"] = Status.CUDA_ERROR_UNKNOWN  # so that steps enqueue
    with sim_desk(rank) as desk:
        rank.driver.faults.calls.clear()
        rank.tensorrt.faults.refused.add(rank.tensorrt.num_enqueues + 5)
        errors = failed(desk.run(desk.requests(PROMPTS, GREEDY)))
        assert errors
        assert all("TensorRT did not run" in error and "an error inside TensorRT" in error for error in errors.values())
        assert desk.tokens(PROMPTS, GREEDY) == wanted


@pytest.mark.parametrize("number", [1, 2, 4])
def test_an_engine_that_answers_false_at_start_is_named(path: Path, number: int) -> None:
    """In the first run a refusal, in a capture a shape that runs eagerly."""
    rank = simulated(path)
    rank.tensorrt.faults.refused.add(number)
    try:
        executor = start(rank)
    except DeviceError as error:
        told = str(error)
    else:
        (told,) = executor._rank.graphs.failures.values()
        executor.close()
    assert "an error inside TensorRT" in told
    assert rank.driver.alive() == []


def test_a_closed_desk_may_be_closed_again(bundles: dict[str, Path]) -> None:
    executor = start(rank := simulated(bundles["rtx"]))
    executor.close()
    executor.close()
    assert rank.driver.alive() == []

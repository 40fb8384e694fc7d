"""Whatever a GPU or TensorRT refuses, at any call: the server stays, tells of it, loses nothing, and goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cuda.bindings.driver import CUresult as Status

from ostinato.engines.sizes import Limits
from ostinato.runtime.request import STEP_FAILED
from tests.bundles import random_prompts
from tests.proof.open_server import StartError, open_server
from tests.proof.tiny_proof import proof_bundle
from tests.scale import scaled
from tests.sim.sim_bundle import simulated
from tests.tiny import VOCAB_SIZE

LIMITS = Limits(8, 3, 16, 40, 80, (1, 2, 3), (16,))
PROMPTS = random_prompts(4, [3, 9, 20])
ASKED = {"model": "toy", "prompt": PROMPTS, "temperature": 0, "max_tokens": 4, "logit_bias": {"7": 1.5}}
TRANSIENT = (Status.CUDA_ERROR_LAUNCH_FAILED, Status.CUDA_ERROR_OUT_OF_MEMORY, Status.CUDA_ERROR_UNKNOWN)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        target: proof_bundle(tmp_path_factory.mktemp(target), target, vocab_size=VOCAB_SIZE, limits=LIMITS)
        for target in ("rtx", "trt")
    }


@pytest.fixture(params=["rtx", "trt"])
def path(request: pytest.FixtureRequest, bundles: dict[str, Path]) -> Path:
    return bundles[request.param]


def spread(count: int, usual: int) -> Iterator[int]:
    """Numbers from 1 to `count`: some of them, or in a soak all."""
    return iter(range(1, count + 1, max(1, count // scaled(usual, count))))


def ask(client: httpx.Client, **changes: Any) -> httpx.Response:
    return client.post("/v1/completions", json=ASKED | changes)


def texts(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def check_failed(response: httpx.Response) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (500, STEP_FAILED), error
    assert "\n" not in error["message"]


def test_any_driver_call_may_fail_while_it_serves(path: Path) -> None:
    rank = simulated(path)
    driver = rank.driver
    num_failed = 0
    with open_server(path, rank) as running, running.client() as client:
        wanted = texts(ask(client))
        before = driver.num_calls
        assert texts(ask(client)) == wanted
        count = driver.num_calls - before
        for number in spread(count, 24):
            driver.faults.at = {driver.num_calls + number: TRANSIENT[number % len(TRANSIENT)]}
            response = ask(client)
            driver.faults.at = {}
            if response.status_code == 200:
                assert texts(response) == wanted, number
            else:
                num_failed += 1
                check_failed(response)
            running.await_idle()
            assert texts(ask(client)) == wanted, number
            assert client.get("/health/ready").status_code == 200, number
    assert num_failed > 3
    assert driver.alive() == []


@pytest.mark.parametrize("number", [1, 17, 40])
def test_a_lost_device_is_told_by_every_answer(path: Path, number: int) -> None:
    rank = simulated(path)
    with open_server(path, rank) as running, running.client() as client:
        texts(ask(client))
        rank.driver.faults.lost_at = rank.driver.num_calls + number
        check_failed(ask(client))
        running.await_idle()
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health").status_code == 200
        assert ask(client).status_code in (500, 503)
        running.await_idle()
    assert rank.driver.alive() == []


def test_any_enqueue_may_answer_false(path: Path) -> None:
    """Where no graph is: steps enqueue engines one by one."""
    rank = simulated(path)
    rank.driver.faults.calls["cuStreamBeginCapture"] = Status.CUDA_ERROR_UNKNOWN
    tensorrt = rank.tensorrt
    with open_server(path, rank) as running, running.client() as client:
        rank.driver.faults.calls.clear()
        wanted = texts(ask(client))
        before = tensorrt.num_enqueues
        assert texts(ask(client)) == wanted
        for number in spread(tensorrt.num_enqueues - before, 6):
            tensorrt.faults.refused = {tensorrt.num_enqueues + number}
            response = ask(client)
            check_failed(response)
            assert "TensorRT did not run" in response.text
            running.await_idle()
            assert texts(ask(client)) == wanted, number
    assert rank.driver.alive() == []


@pytest.mark.parametrize("fault", ["nan", "untouched"])
def test_any_run_may_give_garbage(path: Path, fault: str) -> None:
    """Which a caller may see; others don't. Prompts are new each time: garbage in a cache is some prefix's."""
    rank = simulated(path)
    tensorrt = rank.tensorrt
    probe = {"prompt": [[9, 8, 7]]}
    with open_server(path, rank) as running, running.client() as client:
        wanted = texts(ask(client, **probe))
        before = tensorrt.num_runs
        texts(ask(client))
        for number in spread(tensorrt.num_runs - before, 6):
            setattr(tensorrt.faults, fault, {tensorrt.num_runs + number})
            response = ask(client, prompt=random_prompts(100 + number, [3, 9, 20]))
            assert response.status_code in (200, 400, 500), response.text
            running.await_idle()
            assert texts(ask(client, **probe)) == wanted, number
    assert rank.driver.alive() == []


def test_any_driver_call_may_fail_at_start(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused in one line, or one capture less, which is named, or overcome; never anything else."""
    rank = simulated(path)
    with open_server(path, rank) as running, running.client() as client:
        count = rank.driver.num_calls
        wanted = texts(ask(client))
    told: list[str] = []
    eager = 0
    for number in spread(count, 10):
        rank = simulated(path)
        rank.driver.faults.at[number] = TRANSIENT[number % len(TRANSIENT)]
        caplog.clear()
        try:
            with caplog.at_level(logging.WARNING), open_server(path, rank) as running, running.client() as client:
                assert texts(ask(client)) == wanted, number
                running.await_idle()
                failures = running.loop._executor._rank.graphs.failures  # type: ignore[attr-defined]
        except StartError as error:
            told.append(str(error))
        else:
            eager += len(failures)
            assert all(f"{key} is not captured" in caplog.text for key in failures), number
        assert rank.driver.alive() == [], number
    assert told
    assert not [reason for reason in told if "\n" in reason]
    assert eager


def test_a_failed_capture_is_served_eagerly_but_not_strictly(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_server(path, simulated(path)) as running, running.client() as client:
        wanted = texts(ask(client))
    rank = simulated(path)
    rank.driver.faults.calls["cuGraphInstantiate"] = Status.CUDA_ERROR_OUT_OF_MEMORY
    with open_server(path, rank) as running, running.client() as client:
        assert texts(ask(client)) == wanted
        assert "decode 3 is not captured, its steps run eagerly" in caplog.text
        coverage = running.loop._executor.coverage
        assert coverage is not None
        assert any(key == "decode 3" and "cuGraphInstantiate" in reason for key, reason in coverage.eager)
    with pytest.raises(StartError, match="can't be captured, and graphs are strict"):  # noqa: SIM117
        with open_server(path, rank, is_strict=True):
            pass
    assert rank.driver.alive() == []

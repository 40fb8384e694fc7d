"""A loop that dies, a step that hangs, a model that does not load: all are told, and the process says so at its end."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.fakes import PosLM
from tests.http_calls import LIMITS, complete, error_of, payloads
from tests.load.callers import Heard, body, call_all
from tests.load.toy_process import Toy, toy_process
from tests.scale import IS_SOAK, scaled
from tests.serving import PATIENCE_SECONDS, VOCAB_SIZE, GatedLM, await_true, serving

pytestmark = pytest.mark.timed

NUM_OPEN = 12
DEATHS = [1, 9, *range(2, scaled(2, 30))]
DIES_WITHIN = 10.0 if IS_SOAK else PATIENCE_SECONDS


@pytest.mark.parametrize("dies_at", DEATHS)
def test_a_dead_loop_ends_every_call_and_the_process(tmp_path: Path, dies_at: int) -> None:
    toy = Toy(step_seconds=0.01, max_rows=4, dies_at=dies_at)
    with toy_process(tmp_path, toy) as server:
        asked = [body(number, stream=number % 2 == 0, max_tokens=40) for number in range(NUM_OPEN)]
        heard = asyncio.run(call_all(server.url, asked))
        died_at = time.monotonic()
        assert server.process.wait(PATIENCE_SECONDS) == 1
        assert time.monotonic() - died_at < DIES_WITHIN
        assert "the books are broken" in server.log.read_text()
    for one in heard:
        check_told(one)


def check_told(heard: Heard) -> None:
    assert heard.is_closed
    assert heard.num_ends == 1
    assert heard.error is not None
    assert (heard.error["type"], heard.status in (200, 503)) == ("service_unavailable_error", True)


def test_a_step_that_hangs_is_told_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.runtime.loop.STALL_SECONDS", 0.2)
    gated = GatedLM(PosLM(LIMITS, VOCAB_SIZE))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(complete, client, stream=True, max_tokens=5, ignore_eos=True)
        gated.await_step()
        await_true(lambda: client.get("/health/ready").status_code == 503, "nobody was told")
        assert "no step has finished" in error_of(client.get("/health/ready"), 503)["message"]
        assert client.get("/health").status_code == 200
        gated.permit(100)
        assert payloads(call.result())[-1]["choices"][0]["finish_reason"] == "length"
        await_true(lambda: client.get("/health/ready").status_code == 200, "it did not recover")
        monkeypatch.undo()


def test_a_model_that_does_not_load_ends_the_process_with_1(tmp_path: Path) -> None:
    with toy_process(tmp_path, Toy(fails_to_load=True), wait=False) as server:
        assert server.process.wait(PATIENCE_SECONDS) == 1
        assert "no bundle at nowhere" in server.log.read_text()
        with server.client() as client, pytest.raises(httpx.TransportError):
            client.get("/health")

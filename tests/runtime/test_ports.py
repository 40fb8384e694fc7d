"""The two ports of one server, and what each answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato.runtime.serve_config import ServeConfig
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.server import Server
from ostinato.runtime.server_app import create_app
from tests.fakes import PosLM
from tests.http_calls import LIMITS, chat, complete, error_of, payloads
from tests.scale import scaled
from tests.serving import ANY_PORTS, MODEL, VOCAB_SIZE, GatedLM, Running, TapeLM, await_true, serving


def test_each_port_has_its_routes(running: Running) -> None:
    with running.client() as api, running.metrics_client() as aside:
        for path in ("/", "/metrics", "/debug/state"):
            error_of(api.get(path), 404)
            assert aside.get(path).status_code == 200
        for client in (api, aside):  # the console's playground calls the page's own address
            for path in ("/health", "/health/ready", "/v1/models", "/info", "/openapi.json"):
                assert client.get(path).status_code == 200
            assert chat(client, max_tokens=2, stream=True).status_code == 200


def test_there_need_be_no_metrics_port(tmp_path: Path) -> None:
    config = replace(ANY_PORTS, metrics_port=None)
    with serving(tmp_path, LIMITS, TapeLM(b"ab", 0), config=config) as server, server.client() as client:
        assert server.server.metrics_url is None
        assert complete(client, temperature=0).json()["choices"][0]["text"] == "ab"
        error_of(client.get("/metrics"), 404)


def test_the_metrics_port_outlives_a_drain_and_its_own_calls_are_let_end(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"0123456789", 0))
    with (
        serving(tmp_path, LIMITS, gated) as server,
        server.client() as client,
        server.metrics_client() as aside,
        ThreadPoolExecutor(2) as pool,
    ):
        calls = [pool.submit(complete, one, temperature=0, stream=True) for one in (client, aside)]
        await_true(lambda: len(server.bridge._rows) == 2, "the calls did not start")
        server.server.handle_exit(15, None)
        await_true(lambda: server.door.trouble() is not None, "not draining")
        error_of(httpx.get(server.metrics_url + "/health/ready", verify=False), 503)
        assert "ostinato:num_requests_running" in server.metrics()
        gated.permit(100)
        for call in calls:
            assert "".join(chunk["choices"][0]["text"] for chunk in payloads(call.result())) == "0123456789"
        await_true(lambda: not server.loop.is_alive, "the loop goes on")


def test_info_shows_every_limit_and_no_secret(running: Running, client: httpx.Client) -> None:
    info = client.get("/info").json()
    assert info["model"] == MODEL
    assert info["limits"] == asdict(ServeLimits())
    assert info["engine"]["max_context"] == LIMITS.max_context
    assert info["engine"] == json.loads(json.dumps(asdict(LIMITS)))
    assert info["bundle"] is None  # this server has an executor without one
    assert info["features"]["needs_api_key"] is False
    assert "json_schema" in info["features"]["grammars"]
    assert set(info) == {"version", "model", "bundle", "engine", "limits", "features"}


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = ServeLimits(max_choices=4, max_prompts=3, max_messages=5, max_total_tokens=64)
    with serving(
        tmp_path_factory.mktemp("toy"), LIMITS, PosLM(LIMITS, VOCAB_SIZE), config=replace(ANY_PORTS, limits=limits)
    ) as server:
        yield server


@pytest.mark.parametrize(
    ("call", "field", "at", "past"),
    [
        (complete, "n", 4, 5), (chat, "n", 4, 5), (complete, "prompt", ["a"] * 3, ["a"] * 4),
        (complete, "logprobs", 5, 6), (complete, "max_tokens", 64, 65), (complete, "stop", ["a"] * 4, ["a"] * 5),
        (complete, "stop", "a" * 256, "a" * 257),
        (complete, "logit_bias", {str(i): 0 for i in range(200)}, {str(i): 0 for i in range(1025)}),
        (chat, "messages", [{"role": "user", "content": "a"}] * 5, [{"role": "user", "content": "a"}] * 6),
        (chat, "top_logprobs", 20, 21), (chat, "max_completion_tokens", 64, 65),
    ],
)  # fmt: skip
def test_caps_work_at_the_cap_and_refuse_past_it(capped: Running, call: Any, field: str, at: Any, past: Any) -> None:
    extra: dict[str, Any] = {"logprobs": True} if field == "top_logprobs" else {}
    if "max" not in field:
        extra["max_tokens"] = 1
    with capped.client() as client:
        assert call(client, **extra | {field: at}).status_code == 200
        values = [past, *([10**9, -1] if isinstance(past, int) else [])]
        for value in values * scaled(1, 20):
            error = error_of(call(client, **extra | {field: value}), 400)
            assert error["param"] in (field, "max_tokens", "messages")
        capped.await_idle()


def test_without_a_model_the_metrics_port_says_so(tmp_path: Path) -> None:
    loading = threading.Event()

    def load() -> Any:
        loading.wait()
        raise OSError("over")

    server = Server(create_app(load, ServeConfig(port=0, metrics_port=0)))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        await_true(lambda: server.started, "the server did not start")
        assert server.metrics_url is not None
        await_true(lambda: httpx.get(f"{server.metrics_url}/health", verify=False).status_code == 200, "no answer")
        error_of(httpx.get(f"{server.metrics_url}/health/ready", verify=False), 503)
    finally:
        loading.set()
        thread.join(60)

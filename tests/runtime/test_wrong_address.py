"""Calls that no route takes: they hear what they asked for and what there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.fakes import PosLM
from tests.http_calls import LIMITS, error_of
from tests.serving import ANY_PORTS, VOCAB_SIZE, Running, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", f"POST {CHAT}"), ("/v1/chat/completion", f"POST {CHAT}"), (f"/v1{CHAT}", f"POST {CHAT}"),
        (f"{CHAT}/", f"POST {CHAT}"), (f"/api{CHAT}", f"POST {CHAT}"), ("/completions", f"POST {COMPLETIONS}"),
        ("/responses", "POST /v1/responses"), ("/models", "GET /v1/models"), ("/v1/health", "GET /health"),
        ("/V1/models", "GET /v1/models"), ("/v1/tokenize", "POST /tokenize"),
    ],
)  # fmt: skip
def test_a_slip_hears_the_route_that_is_meant(client: httpx.Client, path: str, meant: str) -> None:
    error = error_of(client.post(path, json={}), 404)
    assert error["message"] == f"there is no route {path}: is {meant} meant?"
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "unknown_url")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/v1/audio/speech", "/v1/files/file-1", "/rerank"])
def test_what_other_servers_do_is_not_served_here(client: httpx.Client, path: str) -> None:
    message = error_of(client.post(path, json={}), 404)["message"]
    assert message.startswith(f"{path} is not served here: this server makes text, at {COMPLETIONS}, {CHAT}, ")


def test_answers_are_not_kept(client: httpx.Client) -> None:
    for path in ("/v1/responses/resp_1", f"{CHAT}/chatcmpl-1"):
        assert "answers are not stored" in error_of(client.get(path), 404)["message"]


def test_what_is_like_nothing_hears_of_every_route(client: httpx.Client) -> None:
    message = error_of(client.get("/zebra?secret=canary"), 404)["message"]
    assert message.startswith(f"there is no route /zebra: there are {COMPLETIONS}, ")
    assert "/v1/models/{name}, /health" in message
    assert "canary" not in message
    long = error_of(client.get("/" + "z" * 3000), 404)["message"]
    assert "z" * 63 + "…" in long
    assert len(long) < 400


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"), ("DELETE", "/v1/models/toy", "GET, HEAD"), ("POST", "/health", "GET, HEAD"),
        ("PATCH", COMPLETIONS, "POST"),
    ],
)  # fmt: skip
def test_another_method_hears_those_that_there_are(client: httpx.Client, method: str, path: str, allowed: str) -> None:
    response = client.request(method, path)
    error = error_of(response, 405)
    assert response.headers["allow"] == allowed
    assert error["message"] == f"{path} does not take {method}: send {allowed.replace(', ', ' or ')}"
    assert error["code"] == "method_not_supported"


def test_routes_of_the_metrics_port_are_told_of(running: Running, tmp_path: Path) -> None:
    paths = ("/", "/metrics", "/debug/requests", "/console/console.js")
    with running.client() as api:
        for path in paths:
            told = error_of(api.get(path), 404)["message"]
            assert told == f"{path} is not on this port but on the metrics port"
    off = replace(ANY_PORTS, metrics_port=None)
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE), config=off) as server, server.client() as api:
        assert "which is off: start with --metrics-port" in error_of(api.get("/metrics"), 404)["message"]
    with running.metrics_client() as aside:
        assert "is GET /debug/requests meant?" in error_of(aside.get("/debug/request"), 404)["message"]

"""Who may call: keys, hosts and origins, by every route, method and spelling; and what each key may use."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import itertools
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato.runtime.keys import Key, Keys
from ostinato.runtime.serve_config import ServeConfig
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.server_app import create_app, create_metrics_app
from tests.fakes import PosLM, make_limits
from tests.http_calls import LIMITS, complete, error_of
from tests.raw_http import connect, post, send
from tests.serving import ANY_PORTS, MODEL, VOCAB_SIZE, GatedLM, Running, TapeLM, await_true, serving

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD")
OPEN = ("/health", "/health/ready")
UNKNOWN = ("/", "/v1", "/nowhere", "/metrics", "/debug/state", "/docs", "/v1/embeddings", "/console/main.js")


def secret(name: str) -> str:
    return f"canary-{name}-0123456789"


def key(name: str, tenant: str = "", **options: Any) -> Key:
    return Key(name, hashlib.sha256(secret(name).encode()).digest(), tenant or name, **options)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret(name)}"}


KEYS = Keys([key("alice", "red"), key("bob", "red"), key("carol"), key("dave", requests_per_minute=3)])


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = replace(ANY_PORTS, cors_origins=("https://page.example",))
    folder = tmp_path_factory.mktemp("toy")
    with serving(folder, LIMITS, PosLM(LIMITS, VOCAB_SIZE), config=config, keys=KEYS) as server:
        yield server


def spellings(path: str) -> list[str]:
    """Of a path, some of which a careless guard takes for an open one."""
    return [
        path, path + "/", "/" + path, path + "?key=" + secret("alice"), path + ";x", path + "%00", path.upper(),
        "/health/.." + path, "/health/ready/.." + path, "/health%2f.." + path, "/./health/.." + path, path + "#/health",
        path.replace("/v1", "/%761"), "http://127.0.0.1" + path, path + "?/health",
    ]  # fmt: skip


WRONG: tuple[dict[str, str], ...] = (
    {}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Bearer canary-alice-012345678"},
    {"authorization": f"Basic {secret('alice')}"}, {"authorization": secret("alice")},
    {"authorization": f"Bearer {secret('alice').upper()}"}, {"x-api-key": secret("alice")},
    {"api-key": secret("alice")}, {"cookie": f"authorization=Bearer {secret('alice')}"},
    {"proxy-authorization": f"Bearer {secret('alice')}"}, {"authorization": f"Bearer {secret('alice')}, x"},
    {"x-forwarded-for": "127.0.0.1"}, {"x-original-url": "/health", "x-http-method-override": "OPTIONS"},
)  # fmt: skip


def asked(connection: http.client.HTTPConnection, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    connection.putrequest(method, path)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    if response.status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert method == "HEAD" or b'"invalid_api_key"' in body
    return response.status, body


def test_nothing_but_health_answers_without_a_key(locked: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with httpx.Client(base_url=locked.url, headers=bearer("alice"), verify=False) as client:
        paths = [path.replace("{name}", MODEL) for path in client.get("/openapi.json").json()["paths"]]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/info", "/tokenize", *OPEN} <= set(paths)
    connection = http.client.HTTPConnection(locked.url.removeprefix("http://"))
    count = 0
    for route, method in itertools.product([*paths, *UNKNOWN], METHODS):
        variants: list[tuple[str, dict[str, str]]] = [(path, {}) for path in spellings(route)] + [
            (route, headers) for headers in WRONG
        ]
        for path, headers in variants:
            status, _ = asked(connection, method, path, headers)
            is_health = path.removeprefix("http://127.0.0.1").partition("?")[0].partition("#")[0] in OPEN
            if not (is_health and method in ("GET", "HEAD")):
                assert status == 401, (method, path, headers)
                count += 1
            elif method == "GET":
                assert status == 200
    connection.close()
    assert count > 6 * 12 * len(paths)
    with httpx.Client(base_url=locked.url, headers=bearer("alice"), verify=False) as client:
        assert complete(client, max_tokens=1).status_code == 200
    assert "canary" not in caplog.text
    assert "canary" not in locked.metrics()


def test_a_preflight_needs_no_key_and_tells_nothing(locked: Running) -> None:
    with locked.client() as client:
        for path in ("/v1/completions", "/nowhere", "/health"):
            asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-a"}
            for origin in ("https://page.example", "https://other.example", "null", ""):
                answer = client.options(path, headers={"origin": origin, **asks})
                assert (answer.status_code, answer.content) == (204, b"")
                is_named = origin == "https://page.example"
                assert answer.headers.get("access-control-allow-origin") == (origin if is_named else None)
                assert answer.headers.get("access-control-allow-headers") == (
                    "authorization, x-a" if is_named else None
                )
                assert "access-control-allow-credentials" not in answer.headers
        assert (
            "access-control-allow-headers"
            not in client.options(
                "/", headers={"origin": "https://page.example", "access-control-request-headers": "a:b"}
            ).headers
        )


@pytest.mark.parametrize("headers", [{}, bearer("alice")])
def test_only_a_named_page_may_read_answers_and_refusals(locked: Running, headers: dict[str, str]) -> None:
    with locked.client() as client:
        for origin in ("https://page.example", "https://page.example.evil", "http://page.example", "null", "*"):
            answer = client.get("/v1/models", headers={"origin": origin, **headers})
            assert answer.status_code == (200 if headers else 401)
            allowed = answer.headers.get("access-control-allow-origin")
            assert allowed == (origin if origin == "https://page.example" else None)
            assert (answer.headers.get("vary") == "origin") == (allowed is not None)


def test_a_page_that_was_not_named_can_not_make_the_machine_work(locked: Running) -> None:
    """Such a request is sent without a preflight, if it has no content type."""
    body = b'{"model":"toy","prompt":"x","max_tokens":1}'
    own = locked.url, locked.metrics_url
    with locked.client() as client:
        client.headers.update(bearer("alice"))
        for origin in ("https://page.example", *own, "https://other.example", "null", locked.url + "0"):
            for url in own:
                answer = client.post(url + "/v1/completions", content=body, headers={"origin": origin})
                if origin in ("https://page.example", url):
                    assert answer.status_code == 200
                else:
                    assert "--cors-origin" in error_of(answer, 403)["message"]


def test_without_origins_no_page_may(running: Running) -> None:
    with running.client() as client:
        for answer in (client.get("/health", headers={"origin": "https://a"}), client.options("/v1/models")):
            assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("127.0.0.1", True), ("127.0.0.1:8000", True), ("LocalHost:99", True), ("[::1]:1", True), ("localhost.", True),
        ("evil.example", False), ("127.0.0.1.evil.example", False), ("localhost.evil.example", False), ("", False),
        ("10.0.0.1", False), ("box.lan:8000", True),
    ],
)  # fmt: skip
def test_a_page_can_not_call_this_machine_under_its_own_name(tmp_path: Path, host: str, is_known: bool) -> None:
    config = replace(ANY_PORTS, allowed_hosts=("box.lan",))
    with serving(tmp_path, LIMITS, TapeLM(b"abc", 0), config=config) as server:
        routes = httpx.get(server.url + "/openapi.json", verify=False).json()["paths"]
        for url in (server.url, server.metrics_url):
            for path in ("/v1/models", "/health", "/health/ready"):
                answer = httpx.get(url + path, headers={"host": host}, verify=False)
                if is_known:
                    assert answer.status_code == 200
                else:
                    assert "--allowed-host" in error_of(answer, 403)["message"]
                assert str(answer.status_code) in routes[path]["get"]["responses"]
        assert all("403" in way["responses"] for route in routes.values() for way in route.values())


def test_with_keys_any_host_name_will_do(locked: Running) -> None:
    with locked.client() as client:
        headers = {"host": "behind.a.proxy.example", **bearer("alice")}
        assert client.get("/v1/models", headers=headers).status_code == 200


def metrics_port_status(config: ServeConfig, path: str, headers: dict[str, str]) -> int:
    """Of an application that no address is bound for."""
    door = create_app(lambda: None, config, KEYS).state.door  # type: ignore[arg-type, return-value]

    async def ask() -> int:
        transport = httpx.ASGITransport(create_metrics_app(door))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.get(path, headers=headers)).status_code

    return asyncio.run(ask())


def test_metrics_and_console_need_a_key_once_other_machines_reach_them() -> None:
    for path in ("/", "/metrics", "/debug/state", "/console/main.js", "/v1/models", "/info", "/nowhere"):
        assert metrics_port_status(ServeConfig(metrics_host="0.0.0.0"), path, {}) == 401
        assert metrics_port_status(ServeConfig(metrics_host="0.0.0.0"), path, bearer("carol")) in (200, 404, 503)
        is_api = path in ("/v1/models", "/info", "/nowhere")
        assert (metrics_port_status(ServeConfig(), path, {}) == 401) == is_api
    assert metrics_port_status(ServeConfig(metrics_host="0.0.0.0"), "/health", {}) == 200


def test_prefixes_are_shared_within_a_tenant_only(locked: Running) -> None:
    def cached(name: str, **fields: Any) -> int:
        with httpx.Client(base_url=locked.url, headers=bearer(name), verify=False) as client:
            usage = complete(client, prompt=[7] * 33, max_tokens=1, **fields).json()["usage"]
        tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert [cached("alice"), cached("alice"), cached("bob"), cached("carol"), cached("carol")] == [0, 32, 32, 0, 32]
    assert [cached("carol", cache_salt="x"), cached("alice", cache_salt="x"), cached("bob", cache_salt="x")] == [
        0,
        0,
        32,
    ]


@contextmanager
def client_of(server: Running, name: str) -> Iterator[httpx.Client]:
    with server.client() as client:
        client.headers.update(bearer(name))
        yield client


@pytest.mark.parametrize("stream", [True, False])
def test_calls_at_once_are_bounded_by_key_and_come_free_however_they_end(tmp_path: Path, stream: bool) -> None:
    gated = GatedLM(PosLM(make_limits(max_rows=8), VOCAB_SIZE))
    config = replace(ANY_PORTS, limits=ServeLimits(max_concurrent_per_key=2))
    body = b'{"model":"toy","prompt":"x","max_tokens":90,"ignore_eos":true,"stream":%s}' % (b"false", b"true")[stream]
    authorization = f"authorization: Bearer {secret('alice')}"
    with (
        serving(tmp_path, make_limits(max_rows=8), gated, config=config, keys=KEYS) as server,
        client_of(server, "alice") as alice,
        client_of(server, "carol") as carol,
        ThreadPoolExecutor(1) as pool,
    ):
        for _ in range(3):
            connections = [connect(server.url) for _ in range(2)]
            for connection in connections:
                send(connection, post("/v1/completions", body, authorization))
            await_true(lambda: len(server.bridge._rows) == 2, "the calls did not start")
            refused = complete(alice)
            assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after"]) > 0
            assert alice.get("/v1/models").status_code == 200  # which costs nothing
            other = pool.submit(complete, carol, max_tokens=1)
            await_true(lambda: len(server.bridge._rows) == 3, "another key has to wait")
            for connection in connections:
                connection.close()
            gated.permit(100)
            assert other.result().status_code == 200
            await_true(lambda: server.door.meter._running["alice"] == 0, "a place is lost")
            for _ in range(3):  # refusals give theirs back
                error_of(complete(alice, max_tokens=-1), 400)
                error_of(complete(alice, model="other"), 404)
            assert complete(alice, max_tokens=1).status_code == 200
            server.await_idle()
            while gated._permits.acquire(blocking=False):
                pass


def test_a_keys_rate_is_bounded(locked: Running) -> None:
    with client_of(locked, "dave") as dave:
        assert [complete(dave, max_tokens=1).status_code for _ in range(3)] == [200] * 3
        refused = complete(dave, max_tokens=1)
        assert "3 calls a minute" in error_of(refused, 429)["message"]
        assert 0 < int(refused.headers["retry-after"]) <= 20
    with client_of(locked, "carol") as carol:
        assert complete(carol, max_tokens=1).status_code == 200

"""What the HTTP server refuses, with which status, and that nothing else suffers."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato.runtime.server_body import digest
from tests.http_calls import LIMITS, chat, complete, error_of, payloads
from tests.serving import ANY_PORTS, MODEL, PATIENCE_SECONDS, VOCAB_SIZE, GatedLM, Running, TapeLM, serving


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [10**6]}, "stop_token_ids"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"), ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"), ({"prompt": [2**40]}, "prompt"), ({"prompt": [[1], [VOCAB_SIZE]]}, "prompt"),
        ({"prompt": ""}, "prompt"), ({"prompt": ["a"] * 64, "n": 3}, "n"), ({"stop": [""]}, "stop"),
        ({"tools": [{}]}, "tools"), ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_before_anything_runs(client: httpx.Client, fields: Any, param: str) -> None:
    error = error_of(complete(client, **fields), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_fields_that_nobody_knows_are_told_of_in_a_header(client: httpx.Client) -> None:
    header = "x-ostinato-ignored"
    plain = complete(client, seed=1)
    assert header not in plain.headers
    for stream in (False, True):
        told = complete(client, seed=1, stream=stream, unheard_of=1, temprature={"a": 1})
        assert (told.status_code, told.headers[header]) == (200, "unheard_of, temprature")
    assert complete(client, seed=1, unheard_of=1).json()["choices"] == plain.json()["choices"]
    turns = [{"role": "user", "content": "x", "unheard_of": 1, "\r\n": 2}]
    told = client.post("/v1/chat/completions", json={"model": MODEL, "messages": turns, "temprature": 1})
    assert (told.status_code, told.headers[header]) == (200, "temprature, messages.0.unheard_of, messages.0.??")
    nasty = {"\r\nset-cookie: a": 1, "ÿ\u2028": 2, "x" * 10_000: 3, **{f"name{number}": 4 for number in range(100)}}
    told = complete(client, temperature=-1, **nasty)
    assert error_of(told, 400)["param"] == "temperature"
    assert told.headers[header].startswith("??set-cookie??a, ??, xxx")
    assert told.headers[header].endswith(", and 83 more")
    assert len(told.headers[header]) < 2000


def test_in_strict_mode_they_are_refused(tmp_path: Path) -> None:
    config = replace(ANY_PORTS, strict_fields=True)
    with serving(tmp_path, LIMITS, TapeLM(b"a", 0), config=config) as server, server.client() as client:
        for path, name in (
            ("/v1/completions", "prompt"), ("/v1/chat/completions", "messages"), ("/v1/responses", "input"),
            ("/tokenize", "prompt"), ("/detokenize", "tokens"),
        ):  # fmt: skip
            error = error_of(client.post(path, json={"model": MODEL, name: "x", "unheard_of": 1}), 400)
            assert (error["param"], error["code"]) == ("unheard_of", "unknown_parameter")


def test_reading_routes_answer_to_head_without_a_body(client: httpx.Client) -> None:
    for path in ("/health", "/health/ready", "/v1/models", f"/v1/models/{MODEL}", "/info", "/openapi.json"):
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"") == (200, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]
    assert client.head("/v1/models/other").status_code == 404


def test_a_chat_that_does_not_fit_names_its_own_fields(client: httpx.Client) -> None:
    for content, fields, param in (
        ("y" * 120, {}, "messages"), ("y", {"max_tokens": 500}, "max_tokens"),
        ("y", {"max_completion_tokens": 500}, "max_completion_tokens"),
    ):  # fmt: skip
        error = error_of(chat(client, content, **fields), 400)
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_wrong_addresses(client: httpx.Client) -> None:
    for response in (complete(client, model="other"), chat(client, model=""), client.get("/v1/models/other")):
        assert error_of(response, 404)["code"] == "model_not_found"
    for path in ("/", "/v1", "/v1/models/", "/docs", "/v1/embeddings", "/health/"):
        error_of(client.get(path), 404)
    assert "GET" in client.post("/health").headers["allow"]
    for method, path in (("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("PUT", "/v1/chat/completions")):
        error_of(client.request(method, path), 405)


def test_bodies_that_are_too_large_or_of_another_kind(client: httpx.Client) -> None:
    blob = b'{"model":"toy","prompt":"' + b"x" * (8 * 2**20) + b'"}'
    headers = {"content-type": "application/json"}
    assert error_of(client.post("/v1/completions", content=blob, headers=headers), 413)["code"] == "body_too_large"

    def parts() -> Iterator[bytes]:
        yield from (blob[at : at + 2**16] for at in range(0, len(blob), 2**16))

    try:  # without a length: the server counts, answers and hangs up while we still send
        response = client.post("/v1/completions", content=parts(), headers=headers)
    except httpx.WriteError:
        pass
    else:
        error_of(response, 413)
    for wrong in ({"content-type": "text/plain"}, {**headers, "content-encoding": "gzip"}):
        error_of(client.post("/v1/completions", content=b"{}", headers=wrong), 415)
    for raw in (b"", b"null", b"[]", b"{", b"[" * 10_000, "{}".encode("utf-16")):
        error_of(client.post("/v1/chat/completions", content=raw, headers=headers), 400)
    assert "context" in error_of(complete(client, prompt="y" * 10**6), 400)["message"]
    assert complete(client, max_tokens=1).status_code == 200


def test_large_bodies_are_digested_beside_the_streams() -> None:
    small, large = (asyncio.run(digest(num_bytes, threading.get_ident)) for num_bytes in (1000, 2**20))
    assert small == threading.get_ident() != large


@pytest.mark.parametrize("call", [complete, chat])
def test_a_body_of_many_parts_gives_the_same_tokens(client: httpx.Client, call: Any) -> None:
    """Past the size up to which a body is digested at once."""
    options = {"max_tokens": 5, "seed": 1, "ignore_eos": True}
    small, large = (call(client, **options, user="x" * size).json() for size in (1, 100_000))
    assert small["choices"] == large["choices"]


def test_heads_that_do_not_end_are_cut_off(running: Running, client: httpx.Client) -> None:
    many = {f"x-{number}": "y" for number in range(200)}
    error_of(client.get("/health", headers=many), 431)
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        with contextlib.suppress(ConnectionError):
            while not select.select([connection], [], [], 0)[0]:
                connection.sendall(b"y" * 2**16)
            assert connection.recv(100).startswith(b"HTTP/1.1 431")
    assert client.get("/health").status_code == 200


def test_request_ids_of_clients_name_nothing_inside(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"0123456789" * 3, 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(2) as pool:
        body = {"model": MODEL, "prompt": "x", "temperature": 0, "max_tokens": 20, "stream": True}
        answers = [
            pool.submit(client.post, "/v1/completions", headers={"x-request-id": "abc"}, json=body) for _ in range(2)
        ]
        gated.permit(100)
        found = [payloads(answer.result()) for answer in answers]
        assert len({chunks[0]["id"] for chunks in found}) == 2
        for chunks in found:
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "01234567890123456789"
    with serving(tmp_path, LIMITS, TapeLM(b"abc", 0)) as server, server.client() as client:
        refused = error_of(complete(client, request_id="abc"), 400)
        assert refused["message"] == "request_id is not supported here: send the header x-request-id"
        for name in ("x" * 10_000, "ÿ"):
            response = client.post("/v1/completions", headers={b"x-request-id": name.encode("latin-1")}, json=body)
            assert payloads(response)

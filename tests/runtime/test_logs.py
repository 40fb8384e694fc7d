"""What the log and the metrics tell, and that nothing of what callers say is in them."""

from __future__ import annotations

import io
import json
import logging
import random
import re
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato.engines.errors import DeviceError
from ostinato.runtime.keys import Keys
from ostinato.runtime.logs import HumanLines, JsonLines
from tests.fakes import PosLM
from tests.http_calls import LIMITS, chat, complete, error_of
from tests.raw_http import connect, read_reply, send
from tests.runtime.test_guard import bearer, key
from tests.scale import scaled
from tests.serving import MODEL, VOCAB_SIZE, FaultyLM, TapeLM, await_true, serving

_ACCESS = re.compile(r"ostinato\.access|req-[0-9a-f]{32}")


@contextmanager
def logged(form: logging.Formatter, level: int = logging.DEBUG) -> Iterator[io.StringIO]:
    """What would stand in the log, from our own loggers and uvicorn's."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(form)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    for name in ("httpx", "httpcore", "asyncio"):  # the test's own client
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield text
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


def access_lines(text: io.StringIO, count: int) -> list[dict[str, Any]]:
    """A line comes once its answer is out, which is a moment after a client has it."""
    await_true(lambda: text.getvalue().count('"ostinato.access"') >= count, "lines are missing")
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    return [line for line in lines if line["logger"] == "ostinato.access"]


def test_each_call_is_one_line_with_its_id_and_counts(tmp_path: Path) -> None:
    keys = Keys([key("alice", "red")])
    with (
        logged(JsonLines(), logging.INFO) as text,
        serving(tmp_path, LIMITS, TapeLM(b"0123456789", 0), keys=keys) as server,
        server.client() as client,
    ):
        client.headers.update(bearer("alice"))
        answers = [
            complete(client, temperature=0, max_tokens=4, n=2),
            complete(client, temperature=0, max_tokens=3, stream=True),
            complete(client, max_tokens=-1),
            client.get("/v1/models/other", headers={"x-request-id": "mine 1"}),
            client.request("PROPFIND", "/nowhere"),
            client.delete("/health"),
            httpx.get(server.url + "/v1/models", verify=False),
        ]
        client.get("/health")
        client.get("/health/ready")
        server.metrics()
        lines = access_lines(text, len(answers))
    assert [line["id"] for line in lines] == [answer.headers["x-request-id"] for answer in answers]
    assert [(line["method"], line["route"], line["status"]) for line in lines] == [
        ("POST", "/v1/completions", 200), ("POST", "/v1/completions", 200), ("POST", "/v1/completions", 400),
        ("GET", "/v1/models/{name:path}", 404), ("other", "other", 404), ("DELETE", "other", 405),
        ("GET", "other", 401),
    ]  # fmt: skip
    assert [line.get("output_tokens") for line in lines[:3]] == [8, 3, None]
    assert [line.get("prompt_tokens") for line in lines[:3]] == [1, 1, None]
    assert [(line.get("key"), line.get("tenant")) for line in lines] == [("alice", "red")] * 6 + [(None, None)]
    assert [line.get("client_id") for line in lines] == [None] * 3 + ["mine 1"] + [None] * 3
    assert all(0 < line["seconds"] < 60 for line in lines)
    assert len({line["id"] for line in lines}) == 7


def test_lines_for_people_hold_the_same(tmp_path: Path) -> None:
    with (
        logged(HumanLines(), logging.INFO) as text,
        serving(tmp_path, LIMITS, TapeLM(b"01", 0)) as server,
        server.client() as client,
    ):
        answer = complete(client, temperature=0)
        await_true(lambda: "/v1/completions" in text.getvalue(), "the line is missing")
    (line,) = [line for line in text.getvalue().splitlines() if "/v1/completions" in line]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO: POST /v1/completions 200 ", line)
    assert f"id={answer.headers['x-request-id']}" in line
    assert "output_tokens=3" in line


@pytest.mark.parametrize("given", ["x" * 129, "é", "a\tb", ""])
def test_an_id_that_could_spoil_the_log_is_left_out(tmp_path: Path, given: str) -> None:
    with (
        logged(JsonLines()) as text,
        serving(tmp_path, LIMITS, TapeLM(b"01", 0)) as server,
        server.client() as client,
    ):
        answer = client.get("/v1/models", headers={b"x-request-id": given.encode("latin-1")})
        assert re.fullmatch(r"req-[0-9a-f]{32}", answer.headers["x-request-id"])
        (line,) = access_lines(text, 1)
    assert "client_id" not in line


def test_a_failure_is_told_with_the_calls_id_and_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = FaultyLM(TapeLM(b"hello", 0), DeviceError("the device refused"))

    words = "-".join(["a", "caller's", "words"])

    def fail(*_: object, **__: object) -> None:
        raise KeyError(words)

    with logged(JsonLines()) as text, serving(tmp_path, LIMITS, faulty) as server, server.client() as client:
        monkeypatch.setattr(server.bridge, "submit", fail)
        answer = complete(client)
        error = error_of(answer, 500)
        assert words not in error["message"]
        server.await_idle()
    (line,) = [json.loads(line) for line in text.getvalue().splitlines() if "traceback" in line]
    assert line["message"] == f"{answer.headers['x-request-id']} failed"
    assert line["level"] == "error"
    assert any("server_completions.py" in frame for frame in line["traceback"])
    assert line["traceback"][-1] == "KeyError"
    assert words not in text.getvalue()
    assert "test_logs.py" in text.getvalue()


def test_what_callers_say_is_neither_in_the_log_nor_in_the_metrics(tmp_path: Path) -> None:
    """Twenty canaries, each in a place of its own."""
    keys = Keys([key("alice"), key("bob")])
    names = iter(f"canary{number:02d}x{chr(97 + number)}" for number in range(100))
    with (
        logged(JsonLines()) as as_json,
        logged(HumanLines()) as as_text,
        serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE), keys=keys) as server,
        server.client() as client,
    ):
        anonymous = {"authorization": f"Bearer {next(names)}"}
        error_of(client.get(f"/v1/models?{next(names)}=1", headers=anonymous), 401)
        client.headers.update(bearer("alice"))  # whose key has "canary" in it, too
        complete(client, prompt=next(names), max_tokens=2, user=next(names), cache_salt=next(names), stop=[next(names)])
        complete(client, prompt="x" * 120 + next(names), max_tokens=2, stream=True)
        chat(client, next(names), max_tokens=2)
        chat(client, next(names) * 100)
        complete(client, model=next(names))
        complete(client, **{next(names): next(names)})
        complete(client, temperature=next(names))
        complete(client, prompt=[[next(names)]])
        complete(client, logit_bias={next(names): 1})
        complete(client, response_format={"type": next(names)})
        complete(client, stop_token_ids=[next(names)])
        client.post("/v1/completions", content=next(names) + "{", headers={"content-type": "application/json"})
        client.post("/v1/completions", content="{}", headers={"content-type": f"text/{next(names)}"})
        client.post("/tokenize", json={"model": MODEL, "prompt": next(names)})
        client.get(f"/{next(names)}/{next(names)}", headers={"cookie": next(names), "user-agent": next(names)})
        client.request(next(names).upper(), "/health")
        with connect(server.url) as connection:
            send(connection, f"GET /{next(names)} HTTP/9.9\r\n{next(names)}\r\n\r\n".encode())
            assert read_reply(connection) is not None
        server.await_idle()
        pages = server.metrics()
    assert int(next(names)[6:8]) > 20
    for text in (as_json.getvalue(), as_text.getvalue(), pages):
        assert len(_ACCESS.findall(text)) > 15 or text is pages
        assert "canary" not in text.lower()


def test_hostile_requests_make_few_series(tmp_path: Path) -> None:
    """Random methods, paths, models, ids and users: 100,000 of them in a soak."""
    chance = random.Random(3)

    def word() -> str:
        return "canary" + "".join(chance.choices(string.ascii_letters, k=9))

    with (
        logged(JsonLines(), logging.INFO) as text,
        serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server,
        server.client() as client,
    ):
        complete(client, max_tokens=1)
        before = {line.rpartition(" ")[0] for line in server.metrics().splitlines()}
        paths = [*client.get("/openapi.json").json()["paths"], "/metrics", "/"]
        with connect(server.url) as connection:
            for number in range(scaled(5_000, 100_000)):
                path = chance.choice(paths) if number % 3 else f"/{word()}/{word()}?{word()}={word()}"
                path = path.replace("{name}", word())
                body = json.dumps({"model": word(), "user": word(), "prompt": word()}).encode()
                method = chance.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND", "SUBSCRIBE"])
                lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"x-request-id: {number}"]
                lines += ["content-type: application/json", f"content-length: {len(body)}", f"{word()}: {word()}"]
                send(connection, "\r\n".join([*lines, "", ""]).encode() + body)
                reply = read_reply(connection)
                assert reply is not None
                assert reply.status < 500
        page = server.metrics()
        assert client.request("XQ1", "/health").status_code == 400  # the parser knows HTTP's methods only
    new = {line.rpartition(" ")[0] for line in page.splitlines()} - before
    assert len(new) <= 50
    assert len(page) <= 2**20
    assert "canary" not in page.lower()
    assert "canary" not in text.getvalue().lower()

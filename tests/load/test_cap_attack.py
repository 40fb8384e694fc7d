"""Every number that a caller may give: at its cap it works, past it the refusal is quick and costs nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from ostinato.runtime.serve_limits import ServeLimits
from tests.http_calls import error_of
from tests.load.toy_process import Toy, ToyProcess, toy_process
from tests.malformed_book import BASES, CHAT, COMPLETIONS, RESPONSES
from tests.scale import IS_SOAK, scaled
from tests.serving import PATIENCE_SECONDS

pytestmark = pytest.mark.timed

CAPS = ServeLimits()
TOY = Toy(max_rows=8, max_waiting=CAPS.max_choices)
CONTEXT = 128  # of the toy
HUGE = 10**9
MAX_REFUSAL_SECONDS = 0.05
MAX_GROWN_BYTES = 16 * 2**20
NUM_REFUSED = scaled(100, 2000)
SHORT = {"max_tokens": 2, "ignore_eos": True}
AT_CAP: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"n": CAPS.max_choices, **SHORT}),
    (COMPLETIONS, {"best_of": CAPS.max_choices, **SHORT}),
    (COMPLETIONS, {"logprobs": CAPS.max_logprobs, **SHORT}),
    (COMPLETIONS, {"prompt": ["x"] * CAPS.max_prompts, **SHORT}),
    (COMPLETIONS, {"prompt": ["x"] * CAPS.max_prompts, "n": CAPS.max_choices // CAPS.max_prompts, **SHORT}),
    (COMPLETIONS, {"max_tokens": CONTEXT - 1, "ignore_eos": True}),
    (COMPLETIONS, {"stop": ["\x01" * CAPS.max_stop_chars] * CAPS.max_stops, **SHORT}),
    (COMPLETIONS, {"stop_token_ids": [7] * 1024, **SHORT}),
    (CHAT, {"n": CAPS.max_choices, **SHORT}),
    (CHAT, {"logprobs": True, "top_logprobs": CAPS.max_top_logprobs, **SHORT}),
    (CHAT, {"max_completion_tokens": CONTEXT - len("user:x\nassistant:"), "ignore_eos": True}),
    (RESPONSES, {"max_output_tokens": CONTEXT - len("user:x\nassistant:"), "ignore_eos": True}),
]
PAST: list[tuple[str, str, list[Any]]] = [
    (COMPLETIONS, "n", [CAPS.max_choices + 1, HUGE, -1]),
    (COMPLETIONS, "best_of", [CAPS.max_choices + 1, HUGE, -1]),
    (COMPLETIONS, "logprobs", [CAPS.max_logprobs + 1, HUGE, -1]),
    (COMPLETIONS, "prompt", [["x"] * (CAPS.max_prompts + 1), ["x"] * 100_000, [HUGE], [-1], [[HUGE]], [7] * CONTEXT]),
    (COMPLETIONS, "max_tokens", [CONTEXT, HUGE, -1]),
    (COMPLETIONS, "stop", [["a"] * (CAPS.max_stops + 1), ["a"] * 100_000, "a" * (CAPS.max_stop_chars + 1)]),
    (COMPLETIONS, "stop_token_ids", [[7] * 1025, [7] * 100_000, [HUGE], [-1]]),
    (COMPLETIONS, "logit_bias", [dict.fromkeys(map(str, range(CAPS.max_logit_bias + 1)), 1), {str(HUGE): 1}]),
    (COMPLETIONS, "min_tokens", [HUGE, -1]),
    (CHAT, "n", [CAPS.max_choices + 1, HUGE, -1]),
    (CHAT, "top_logprobs", [CAPS.max_top_logprobs + 1, HUGE, -1]),
    (CHAT, "max_tokens", [CONTEXT, HUGE, -1]),
    (CHAT, "max_completion_tokens", [CONTEXT, HUGE, -1]),
    (CHAT, "messages", [[{"role": "user", "content": "x"}] * (CAPS.max_messages + 1)]),
    (RESPONSES, "max_output_tokens", [CONTEXT, HUGE, -1]),
    (RESPONSES, "top_logprobs", [CAPS.max_top_logprobs + 1, HUGE, -1]),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyProcess]:
    with toy_process(tmp_path_factory.mktemp("toy"), TOY) as server, server.client() as client:
        for path, fields in AT_CAP:  # each once, so that what is loaded or grows once is there
            assert ask(client, path, fields).status_code == 200
        yield server
        assert server.end() == 0


def ask(client: httpx.Client, path: str, fields: dict[str, Any]) -> httpx.Response:
    return client.post(path, json={**BASES[path], **fields})


def check_quick(seconds: list[float]) -> None:
    """The median in every run, and nearly all where nothing else runs."""
    median, p99 = np.quantile(seconds, [0.5, 0.99])
    print(f"{len(seconds)} refusals: median {median * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")
    assert median <= MAX_REFUSAL_SECONDS
    assert not IS_SOAK or p99 <= MAX_REFUSAL_SECONDS


def check_grown(server: ToyProcess, before: int) -> None:
    grown = server.resident_bytes() - before
    print(f"memory grew by {grown / 2**20:.1f} MiB")
    assert grown <= MAX_GROWN_BYTES


def test_at_its_cap_each_works_and_costs_little_memory(server: ToyProcess) -> None:
    before = server.resident_bytes()
    with server.client() as client:
        for path, fields in AT_CAP * scaled(1, 20):
            answer = ask(client, path, fields)
            assert answer.status_code == 200, (path, fields, answer.text)
            choices = max(fields.get("n", 1), 1) * (len(fields.get("prompt", "x")))
            assert path == RESPONSES or len(answer.json()["choices"]) == choices
    check_grown(server, before)


def test_past_its_cap_each_is_refused_at_once(server: ToyProcess) -> None:
    before = server.resident_bytes()
    seconds = []
    with server.client() as client:
        for path, field, values in PAST * scaled(2, 20):
            for value in values:
                fields = {field: value} | ({"logprobs": True} if (path, field) == (CHAT, "top_logprobs") else {})
                began_at = time.monotonic()
                answer = ask(client, path, fields)
                seconds.append(time.monotonic() - began_at)
                assert error_of(answer, 400)["param"] == field, (path, field, answer.text)
    check_quick(seconds)
    check_grown(server, before)


def test_past_the_queue_each_is_refused_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    toy = Toy(step_seconds=0.5, max_rows=8, max_waiting=16)  # full for a minute, which the first rows take
    fill = {**BASES[COMPLETIONS], "n": toy.max_rows + toy.max_waiting, "max_tokens": 120, "ignore_eos": True}
    with (
        toy_process(tmp_path_factory.mktemp("toy"), toy) as server,
        server.client() as client,
        server.client() as other,
    ):
        with other.stream("POST", COMPLETIONS, json={**fill, "stream": True}) as fillers:
            assert fillers.status_code == 200
            for path in BASES:
                ask(client, path, {})
            before = server.resident_bytes()
            seconds = []
            for number in range(NUM_REFUSED):
                path = (COMPLETIONS, CHAT, RESPONSES)[number % 3]
                began_at = time.monotonic()
                answer = ask(client, path, {})
                seconds.append(time.monotonic() - began_at)
                assert error_of(answer, 429)["code"] == "queue_full"
                assert int(answer.headers["retry-after"]) >= 1
            check_quick(seconds)
            check_grown(server, before)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while ask(client, COMPLETIONS, {"max_tokens": 1}).status_code != 200:  # who filled it has left
            assert time.monotonic() < deadline

"""The HTTP server over executors without a model: values, refusals, shapes and states, through real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ostinato.engines.errors import BundleError, DeviceError, OstinatoError
from ostinato.runtime.server import Server, create_app, run, server_config
from ostinato.runtime.server_body import digest
from tests.fakes import PosLM, ScriptedLM, histories, logits_of, make_limits, mix
from tests.serving import MODEL, PATIENCE_SECONDS, VOCAB_SIZE, FaultyLM, GatedLM, Running, TapeLM, await_true, serving

LIMITS = make_limits(max_rows=8, max_step_tokens=64, max_context=128)
CHAT_FRAME = len("user:\nassistant:")  # tokens that the template adds to a one-turn conversation


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("toy"), LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client
    running.await_idle()


def complete(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"model": MODEL, "prompt": "x"} | fields)


def chat(client: httpx.Client, content: Any = "x", **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages} | fields)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The one error object of a refusal."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 8192
    table: dict[str, Any] = response.json()
    assert list(table) == ["error"]
    error: dict[str, Any] = table["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def payloads(response: httpx.Response) -> list[Any]:
    """The JSON of every event; [DONE] must be the last."""
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event[6:]) for event in events[:-2]]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [
        (126, "unset", 2), (126, None, 2), (126, 1, 1), (126, 2, 2), (126, 3, "context_length_exceeded"),
        (127, "unset", 1), (127, 1, 1), (127, 2, "context_length_exceeded"), (127, None, 1),
        (128, "unset", "context_length_exceeded"), (128, 1, "context_length_exceeded"),
        (129, "unset", "context_length_exceeded"), (129, None, "context_length_exceeded"),
        (126, 10**9, "context_length_exceeded"), (126, -1, "invalid_value"), (126, 1.5, "invalid_type"),
        (126, True, "invalid_type"), (126, 0, "invalid_value"), (20, "unset", 16),
    ],
)  # fmt: skip
def test_max_tokens_at_the_context_edge(client: httpx.Client, num_prompt: int, max_tokens: Any, expected: Any) -> None:
    fields = {} if max_tokens == "unset" else {"max_tokens": max_tokens}
    answers = [
        complete(client, prompt=[7] * num_prompt, ignore_eos=True, **fields),
        chat(client, "y" * (num_prompt - CHAT_FRAME), ignore_eos=True, **fields),
    ]
    for answer, whole_context in zip(answers, (False, True), strict=True):
        if isinstance(expected, str):
            error = error_of(answer, 400)
            assert error["code"] == expected
            assert "-" not in error["message"].replace("-1", "")
        else:
            usage = answer.json()["usage"]
            assert usage["prompt_tokens"] == num_prompt
            assert usage["completion_tokens"] == (128 - num_prompt if num_prompt == 20 and whole_context else expected)
            assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_n_choices_are_distinct_and_repeat_with_their_seed(client: httpx.Client) -> None:
    first = complete(client, n=8, seed=7, max_tokens=12, ignore_eos=True, logprobs=0).json()
    again = complete(client, n=8, seed=7, max_tokens=12, ignore_eos=True, logprobs=0).json()
    texts = [choice["logprobs"]["tokens"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == list(range(8))
    assert len({tuple(text) for text in texts}) == 8
    assert [choice["logprobs"]["tokens"] for choice in again["choices"]] == texts
    assert (first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]) == (1, 96)
    unseeded = [complete(client, max_tokens=12, ignore_eos=True).json()["choices"][0]["text"] for _ in range(8)]
    assert len(set(unseeded)) == 8
    greedy = complete(client, n=3, temperature=0, max_tokens=12).json()["choices"]
    assert len({choice["text"] for choice in greedy}) == 1


def test_prompts_in_a_list_are_numbered_through_and_equal_their_own_calls(client: httpx.Client) -> None:
    options = {"seed": 5, "n": 2, "max_tokens": 5, "ignore_eos": True}
    together = complete(client, prompt=["ab", "c"], **options).json()
    for offset, prompt in ((0, "ab"), (2, "c")):
        alone = complete(client, prompt=prompt, **options).json()["choices"]
        for choice in alone:
            assert together["choices"][offset + choice["index"]] == choice | {"index": offset + choice["index"]}
    assert together["usage"]["prompt_tokens"] == 3
    by_ids = complete(client, prompt=[[*b"ab"], [*b"c"]], **options).json()
    assert [choice["text"] for choice in by_ids["choices"]] == [choice["text"] for choice in together["choices"]]


@pytest.mark.parametrize("call", [complete, chat])
def test_a_stream_is_the_whole_answer(client: httpx.Client, call: Any) -> None:
    options = {"n": 3, "seed": 3, "max_tokens": 20}
    whole = call(client, **options).json()
    chunks = payloads(call(client, **options, stream=True, stream_options={"include_usage": True}))
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == choice["index"]]
        if call is chat:
            assert "".join(part["delta"].get("content", "") for part in mine) == choice["message"]["content"]
        else:
            assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [choice["finish_reason"]]
    assert chunks[-1]["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}


def test_the_usage_chunk_comes_once_and_only_if_asked_for(client: httpx.Client) -> None:
    options = {"n": 2, "max_tokens": 5, "stream": True, "ignore_eos": True, "prompt": [9] * 33}
    complete(client, **options)  # now two full blocks of the prompt are known
    chunks = payloads(complete(client, **options, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    details = {"cached_tokens": 32}
    expected = {"prompt_tokens": 33, "completion_tokens": 10, "total_tokens": 43, "prompt_tokens_details": details}
    assert chunks[-1]["usage"] == expected
    unasked: list[dict[str, Any]] = [{}, {"stream_options": {"include_usage": False}}, {"stream_options": None}]
    for fields in unasked:
        plain = payloads(complete(client, **options, **fields))
        assert all("usage" not in chunk and chunk["choices"] for chunk in plain)
    for stream in (False, None):
        error = error_of(complete(client, **options | {"stream": stream}, stream_options={"include_usage": True}), 400)
        assert error["param"] == "stream_options"


def test_chat_chunks_begin_with_the_role_and_end_with_a_reason_of_their_own(client: httpx.Client) -> None:
    chunks = payloads(chat(client, stream=True, n=2, max_tokens=3, logit_bias={"256": -100}))
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert mine[-1]["delta"] == {}
        assert mine[-1]["finish_reason"] == "length"
        assert all(part["finish_reason"] is None for part in mine[:-1])
        assert all(list(part["delta"]) == ["content"] and part["delta"]["content"] for part in mine[1:-1])


def test_an_answer_without_a_token_has_role_and_reason(tmp_path: Path) -> None:
    with serving(tmp_path, LIMITS, TapeLM(b"", 0)) as server, server.client() as client:
        chunks = payloads(chat(client, stream=True, temperature=0))
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        whole = chat(client, temperature=0).json()
        assert whole["choices"][0]["message"]["content"] == ""
        assert whole["usage"]["completion_tokens"] == 1


def test_lines_of_every_kind_survive_line_based_clients(tmp_path: Path) -> None:
    text = "a\u2028b\u0085\u2029\x0b\x1c\r\n\ndata: x\x00é\x7f"
    with serving(tmp_path, LIMITS, TapeLM(text.encode(), 0)) as server, server.client() as client:
        options = {"model": MODEL, "prompt": "x", "temperature": 0, "max_tokens": 100, "stream": True}
        raw = client.post("/v1/completions", json=options)
        assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert raw.headers["cache-control"] == "no-cache"
        assert raw.headers["x-accel-buffering"] == "no"
        assert "".join(chunk["choices"][0]["text"] for chunk in payloads(raw)) == text
        with client.stream("POST", "/v1/completions", json=options) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        assert "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines) == text


@pytest.mark.parametrize("call", [complete, chat])
def test_an_answer_cut_inside_a_character_is_one_mark_and_its_bytes(tmp_path: Path, call: Any) -> None:
    tape = TapeLM("€".encode(), 0 if call is complete else CHAT_FRAME)
    with serving(tmp_path, LIMITS, tape) as server, server.client() as client:
        for logprobs in (None, 1) if call is complete else (None, True):
            options = {"temperature": 0, "max_tokens": 2, "logprobs": logprobs}
            whole = call(client, **options).json()
            (choice,) = whole["choices"]
            assert (choice["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 2)
            assert (choice["text"] if call is complete else choice["message"]["content"]) == "\N{REPLACEMENT CHARACTER}"
            if logprobs and call is chat:
                assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[0xE2], [0x82]]
            elif logprobs:
                assert choice["logprobs"]["tokens"] == ["bytes:\\xe2", "bytes:\\x82"]
            parts = [chunk["choices"][0] for chunk in payloads(call(client, **options, stream=True))]
            texts = [part["text"] if call is complete else part["delta"].get("content", "") for part in parts]
            assert "".join(texts) == "\N{REPLACEMENT CHARACTER}"
            assert parts[-1]["finish_reason"] == "length"


def test_stop_strings_end_a_choice_and_its_row(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"ABCDEFGHIJ" * 9, 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        for stream in (False, True):
            before = len(gated.batches)
            call = pool.submit(complete, client, temperature=0, max_tokens=80, stop=["EF", "DEF"], stream=stream)
            gated.await_step()
            for _ in "ABCDEF":
                gated.permit()
                gated.await_step()
            answer = call.result()
            choices = [chunk["choices"][0] for chunk in payloads(answer)] if stream else answer.json()["choices"]
            assert "".join(choice["text"] for choice in choices) == "ABC"
            assert choices[-1]["finish_reason"] == "stop"
            assert stream or answer.json()["usage"]["completion_tokens"] == 6
            gated.permit()
            server.await_idle()
            assert len(gated.batches) - before == 7  # the step that ran when the stop was found is the last


def reference_logprobs(ids: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[T, V] natural-log softmax that PosLM's rule gives after each of `ids`."""
    at = np.arange(len(ids))
    kept = histories(at.astype(np.int64), np.array(ids, np.int64)) * (mix(at.astype(np.uint64)) | np.uint64(1))
    logits = logits_of(np.cumsum(kept), VOCAB_SIZE).astype(np.float64)
    logprobs: np.ndarray[Any, np.dtype[np.float64]] = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs


@pytest.mark.parametrize("prompt", ["The sky is blue", [*b"The sky is blue"], "é" * 40])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_scores_the_prompt(client: httpx.Client, prompt: Any, max_tokens: int) -> None:
    ids = [*prompt.encode()] if isinstance(prompt, str) else prompt
    options = {"echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2, "temperature": 0, "prompt": prompt}
    answer = complete(client, **options).json()
    expected = reference_logprobs(ids)
    for choice in answer["choices"]:
        lists, text = choice["logprobs"], choice["text"]
        assert text.startswith(bytes(ids).decode())
        assert all(len(values) == len(ids) + max_tokens for values in lists.values())
        assert lists["token_logprobs"][0] is None
        assert lists["top_logprobs"][0] is None
        np.testing.assert_allclose(
            lists["token_logprobs"][1 : len(ids)], [expected[i, ids[i + 1]] for i in range(len(ids) - 1)], atol=1e-4
        )
        for best, row in zip(lists["top_logprobs"][1:], expected, strict=False):
            np.testing.assert_allclose(sorted(best.values())[-2:], np.sort(row)[-2:], atol=1e-4)
            assert len(best) in (2, 3)
        if text.isascii():
            for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
                assert token.startswith("bytes:") or text[offset:].startswith(token)
        assert lists["text_offset"][: len(ids)] == [
            len(bytes(ids[:i]).decode(errors="ignore")) for i in range(len(ids))
        ]
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    chunks = payloads(complete(client, **options, stream=True))
    for choice in answer["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [item for part in mine if part["logprobs"] for item in part["logprobs"][name]] == values


def test_echo_without_logprobs(client: httpx.Client) -> None:
    assert complete(client, prompt=["ab", "c"], echo=True, max_tokens=0).json()["choices"] == [
        {"index": index, "text": text, "logprobs": None, "finish_reason": "length"}
        for index, text in enumerate(("ab", "c"))
    ]
    chunks = payloads(complete(client, prompt="ab", echo=True, max_tokens=0, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["ab", ""]


def test_chat_logprobs_have_every_token_once_with_its_bytes(client: httpx.Client) -> None:
    options = {"logprobs": True, "top_logprobs": 5, "max_tokens": 30, "seed": 1, "ignore_eos": True}
    whole = chat(client, **options).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"] == 30
    for entry in content:
        best = entry["top_logprobs"]
        assert len(best) == 5
        assert [item["logprob"] for item in best] == sorted((item["logprob"] for item in best), reverse=True)
        assert len({tuple(item["bytes"]) for item in best}) == 5
        assert [item for item in best if item["bytes"] == entry["bytes"]] in (
            [],
            [{key: entry[key] for key in ("token", "logprob", "bytes")}],
        )
        if len(entry["bytes"]) == 1 and entry["bytes"][0] > 127:
            assert entry["token"] == f"bytes:\\x{entry['bytes'][0]:02x}"
    chunks = payloads(chat(client, **options, stream=True))
    streamed = [part for chunk in chunks if (part := chunk["choices"][0]["logprobs"])]
    assert [entry for part in streamed for entry in part["content"]] == content
    few = chat(client, **options | {"top_logprobs": 0}).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in few] == [entry["logprob"] for entry in content]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [10**6]}, "stop_token_ids"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"), ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"), ({"prompt": [2**40]}, "prompt"), ({"prompt": [[1], [VOCAB_SIZE]]}, "prompt"),
        ({"prompt": ""}, "prompt"), ({"prompt": ["a"] * 64, "n": 3}, "n"), ({"stop": [""]}, "stop"),
        ({"tools": [{}]}, "tools"), ({"unheard_of": 1}, "unheard_of"), ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_before_anything_runs(client: httpx.Client, fields: Any, param: str) -> None:
    error = error_of(complete(client, **fields), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_wrong_addresses(client: httpx.Client) -> None:
    for response in (complete(client, model="other"), chat(client, model=""), client.get("/v1/models/other")):
        assert error_of(response, 404)["code"] == "model_not_found"
    for path in ("/", "/v1", "/v1/models/", "/docs", "/openapi.json", "/v1/embeddings", "/health/"):
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
    assert client.get("/health", headers=many).status_code == 400
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        with contextlib.suppress(ConnectionError):
            while not select.select([connection], [], [], 0)[0]:
                connection.sendall(b"y" * 2**16)
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
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
        error_of(complete(client, request_id="abc"), 400)
        for name in ("x" * 10_000, "ÿ"):
            response = client.post("/v1/completions", headers={b"x-request-id": name.encode("latin-1")}, json=body)
            assert payloads(response)


def test_models_and_health(client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 128)
    assert client.get(f"/v1/models/{MODEL}").json() == card
    assert client.get("/health").status_code == client.get("/health/ready").status_code == 200


def test_metrics_count_and_have_no_label_of_a_client(tmp_path: Path) -> None:
    limits = make_limits(max_rows=4)
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server, server.client() as client:
        before = client.get("/metrics").text
        complete(client, prompt=[5] * 33, n=2, max_tokens=4, ignore_eos=True)
        complete(client, prompt=[5] * 33, max_tokens=4, ignore_eos=True)
        for number in range(20):
            client.get(f"/nowhere/{number}")
            complete(client, model=f"canary{number}", user=f"canary{number}")
        server.await_idle()
        text = client.get("/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert values["ostinato:prompt_tokens_total"] == 99
    assert values["ostinato:generation_tokens_total"] == 12
    assert values['ostinato:request_success_total{finished_reason="length"}'] == 3
    assert values["ostinato:time_to_first_token_seconds_count"] == 3
    assert values["ostinato:inter_token_latency_seconds_count"] == 9
    assert values["ostinato:e2e_request_latency_seconds_count"] == 3
    assert values["ostinato:prefix_cache_queries_total"] == 99
    assert values["ostinato:prefix_cache_hits_total"] >= 32
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert values[f"ostinato:{name}"] == 0
    assert "canary" not in text
    assert [line.rpartition(" ")[0] for line in before.splitlines()] == [
        line.rpartition(" ")[0] for line in text.splitlines()
    ]


def test_a_full_queue_is_refused_with_a_hint(tmp_path: Path) -> None:
    limits = make_limits(max_rows=2)
    gated = GatedLM(PosLM(limits, VOCAB_SIZE))
    with serving(tmp_path, limits, gated, 3) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(complete, client, n=4, max_tokens=2, ignore_eos=True)
        gated.await_step()
        response = complete(client, n=2)
        assert error_of(response, 429)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) > 0
        second = pool.submit(complete, client, n=1, max_tokens=2, ignore_eos=True)
        gated.permit(100)
        assert first.result().status_code == second.result().status_code == 200
        assert complete(client, n=2, max_tokens=1).status_code == 200


@pytest.mark.parametrize("call", [complete, chat])
def test_a_failing_step_is_an_error_object_and_the_next_call_is_right(tmp_path: Path, call: Any) -> None:
    faulty = FaultyLM(TapeLM(b"hello", 0 if call is complete else CHAT_FRAME), DeviceError("the device refused"))
    with serving(tmp_path, LIMITS, faulty) as server, server.client() as client:
        for _ in range(3):
            faulty.is_bad = True
            error = error_of(call(client, temperature=0), 500)
            assert (error["message"], error["type"]) == ("the device refused", "server_error")
            *chunks, last = payloads(call(client, temperature=0, stream=True, n=2))
            assert last["error"]["message"] == "the device refused"
            assert all("error" not in chunk for chunk in chunks)
        assert "steps failed" in error_of(client.get("/health/ready"), 503)["message"]
        assert client.get("/health").status_code == 200
        faulty.is_bad = False
        choice = call(client, temperature=0).json()["choices"][0]
        assert (choice["text"] if call is complete else choice["message"]["content"]) == "hello"
        assert client.get("/health/ready").status_code == 200
        server.await_idle()


def test_a_choice_that_can_not_go_on_is_the_callers_error(tmp_path: Path) -> None:
    only_stop = ScriptedLM([[0.0 if token == 4 else -np.inf for token in range(VOCAB_SIZE)]])
    masked = {"min_tokens": 5, "stop_token_ids": [4]}
    with serving(tmp_path, LIMITS, only_stop) as server, server.client() as client:
        assert error_of(complete(client, **masked), 400)["code"] == "no_legal_token"
        assert payloads(complete(client, stream=True, **masked))[-1]["error"]["code"] == "no_legal_token"
        server.await_idle()


def test_logits_that_are_no_numbers_are_the_servers_error(tmp_path: Path) -> None:
    broken = ScriptedLM([[float("nan")] * VOCAB_SIZE])
    with serving(tmp_path, LIMITS, broken) as server, server.client() as client:
        assert error_of(complete(client), 500)["code"] == "backend_failure"
        assert payloads(complete(client, stream=True))[-1]["error"]["code"] == "backend_failure"
        server.await_idle()


def test_a_silent_stream_gets_comments(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"ab", 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client:
        options = {"model": MODEL, "prompt": "x", "temperature": 0, "max_tokens": 2, "stream": True}
        with client.stream("POST", "/v1/completions", json=options) as response:
            assert response.status_code == 200  # headers are there before the first token
            gated.await_step()
            lines = response.iter_lines()
            home = server.bridge._home
            assert home is not None
            for _ in range(2):
                home.call_soon_threadsafe(server.bridge._beat)
            assert next(lines) == ": keep-alive"
            gated.permit(10)
            texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
            assert "".join(texts) == "ab"


def test_draining_ends_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"0123456789", 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(4) as pool:
        client.get("/health")  # a connection that stays open
        streams = [pool.submit(complete, server.client(), temperature=0, stream=True) for _ in range(3)]
        await_true(lambda: len(server.bridge._rows) == 3, "the streams did not start")
        home = server.bridge._home
        assert home is not None
        home.call_soon_threadsafe(server.door.drain, 30.0)
        await_true(lambda: server.door.trouble() is not None, "not draining")
        error_of(client.get("/health/ready"), 503)
        response = complete(client)
        assert error_of(response, 503)["code"] == "not_ready"
        assert "retry-after" in response.headers
        assert client.get("/health").status_code == 200
        server.server.should_exit = True
        gated.permit(100)
        for stream in streams:
            assert "".join(chunk["choices"][0]["text"] for chunk in payloads(stream.result())) == "0123456789"


def test_what_is_not_done_when_draining_ends_gets_an_error_event(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"0123456789", 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(2) as pool:
        cut = pool.submit(complete, client, stream=True)
        cut_whole = pool.submit(complete, client)
        await_true(lambda: len(server.bridge._rows) == 2, "the calls did not start")
        home = server.bridge._home
        assert home is not None
        home.call_soon_threadsafe(server.door.drain, 0.0)
        assert payloads(cut.result())[-1]["error"]["code"] == "not_ready"
        error_of(cut_whole.result(), 503)
        gated.permit(100)
        server.await_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_second_ctrl_c_cuts_what_runs(tmp_path: Path, stream: bool) -> None:
    gated = GatedLM(TapeLM(b"0123456789", 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(complete, client, temperature=0, stream=stream)
        gated.await_step()
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            server.server.handle_exit(sign, None)
        await_true(lambda: server.door.trouble() is not None, "not draining")
        gated.permit()
        gated.await_step()
        assert not call.done()
        server.server.handle_exit(signal.SIGINT, None)
        if stream:
            assert payloads(call.result())[-1]["error"]["code"] == "not_ready"
        else:
            error_of(call.result(), 503)
        gated.permit()
        await_true(lambda: not server.loop.is_alive, "the loop goes on")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_that_can_not_be_had_is_refused_before_anything_is_loaded(host: str) -> None:
    loaded = threading.Event()
    app = create_app(lambda: loaded.set())  # type: ignore[arg-type, return-value]
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        other.bind((host, 0))
        other.listen()
        for port in (other.getsockname()[1], 99_999, -1):
            with pytest.raises(OstinatoError, match=f"can't listen on {host} port {port} .*give another"):
                run(app, host, port)
    assert not loaded.is_set()


def test_a_signal_drains_and_stops_the_server(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"0123456789", 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(complete, client, temperature=0, stream=True)
        gated.await_step()
        server.server.handle_exit(15, None)
        await_true(lambda: server.door.trouble() is not None, "not draining")
        gated.permit(100)
        assert "".join(chunk["choices"][0]["text"] for chunk in payloads(stream.result())) == "0123456789"
        await_true(lambda: not server.loop.is_alive, "the loop goes on")
        with pytest.raises(httpx.TransportError):
            client.get("/health")


TOY_PROCESS = """
import sys, time
from pathlib import Path
from ostinato.runtime.bridge import Bridge
from ostinato.runtime.door import Served
from ostinato.runtime.metrics import Metrics
from ostinato.runtime.server import create_app, run
from tests.fakes import make_limits
from tests.serving import MODEL, TapeLM, make_intake, make_loop, toy_tokenizer

class SlowLM(TapeLM):
    def run(self, batch):
        time.sleep(0.05)
        return super().run(batch)

limits = make_limits()
loop = make_loop(limits, SlowLM(b"0123456789" * 2, 0))
bridge = Bridge(loop, make_intake(limits), toy_tokenizer(Path(sys.argv[1])), Metrics())
run(create_app(lambda: Served(MODEL, bridge)), "127.0.0.1", int(sys.argv[2]))
"""


HUNG_PROCESS = """
import sys, time
from ostinato.runtime.server import create_app, run
run(create_app(lambda: time.sleep(1000)), "127.0.0.1", int(sys.argv[1]))
"""


def test_a_second_ctrl_c_ends_a_process_whose_loading_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", HUNG_PROCESS, str(port)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for signalled_at in ("Application startup complete", "Waiting for application shutdown"):
                assert any(signalled_at in line for line in process.stderr)
                process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_SECONDS) == 130
        finally:
            process.kill()


def test_a_process_that_is_told_to_end_lets_its_streams_end_and_exits_with_0(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", TOY_PROCESS, str(tmp_path), str(port)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS, verify=False)

    def is_ready() -> bool:
        try:
            return client.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    try:
        await_true(is_ready, "the process did not start")
        options = {"model": MODEL, "prompt": "x", "temperature": 0, "max_tokens": 20, "stream": True}
        with client.stream("POST", "/v1/completions", json=options) as response:
            process.send_signal(signal.SIGTERM)
            lines = [line for line in response.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == "0123456789" * 2
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        client.close()
        process.kill()
        process.wait()


def test_while_loading_only_liveness_is_green_and_a_failure_to_load_stops_the_server() -> None:
    loading = threading.Event()

    def load() -> Any:
        loading.wait()
        raise BundleError("no bundle at nowhere: build one")

    app = create_app(load)
    server = Server(server_config(app, "127.0.0.1", 0), app.state.door)
    thread = threading.Thread(target=server.run)
    thread.start()
    await_true(lambda: server.started, "the server did not start")
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    with httpx.Client(base_url=f"http://{host}:{port}") as client:
        assert client.get("/health").status_code == 200
        for response in (
            client.get("/health/ready"),
            client.get("/v1/models"),
            complete(client),
            client.get("/metrics"),
        ):
            assert "loading" in error_of(response, 503)["message"]
    loading.set()
    thread.join(20)
    assert not thread.is_alive()
    assert str(app.state.door.failure).startswith("no bundle")

"""The metrics port's accounts: /debug/…, the trace that Perfetto opens, and that the dashboard shows what is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from ostinato.runtime.critical_path import SPANS
from tests.fakes import PosLM, make_limits
from tests.http_calls import chat, complete, error_of
from tests.serving import VOCAB_SIZE, GatedLM, Running, await_true, serving

DEPLOY = Path(__file__).parents[2] / "deploy"
CANARY = "canary-7391"
LIMITS = make_limits(max_step_tokens=32, max_rows=4)
NUM_CALLS = 5


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server after a few calls."""
    with serving(tmp_path_factory.mktemp("toy"), LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server:
        with server.client() as client:
            complete(client, prompt=CANARY * 5, max_tokens=4, ignore_eos=True)
            complete(client, prompt=CANARY, n=3, max_tokens=2, ignore_eos=True)
            chat(client, CANARY, max_tokens=3, stream=True, ignore_eos=True, user=CANARY)
            complete(client, prompt=CANARY, temperature=-1)
            client.post("/v1/completions", json={"model": CANARY, "prompt": "x"})
            complete(client, prompt=CANARY, max_tokens=0, echo=True)
        await_true(lambda: len(server.bridge.ledger.recent.last()) == NUM_CALLS + 1, "calls are missing")
        yield server


@pytest.fixture
def debug(used: Running) -> Iterator[httpx.Client]:
    with used.metrics_client() as client:
        yield client


def test_requests_are_listed_newest_first_without_any_text(debug: httpx.Client) -> None:
    answer = debug.get("/debug/requests", params={"n": NUM_CALLS})
    assert CANARY not in answer.text
    table = answer.json()
    assert table["spans"] == list(SPANS)
    calls = table["requests"]
    assert [call["status"] for call in calls] == [200, 404, 400, 200, 200]
    for call in calls:
        assert sum(call["spans_ms"].values()) == pytest.approx(call["total_ms"], abs=1 + 0.01 * call["total_ms"])
    streamed, several = calls[3], calls[4]
    assert (streamed["route"], streamed["output_tokens"]) == ("/v1/chat/completions", 3)
    assert (several["choices"], several["output_tokens"], several["finish_reasons"]) == (3, 6, ["length"] * 3)


def test_one_request_is_told_piece_by_piece(debug: httpx.Client) -> None:
    first = debug.get("/debug/requests").json()["requests"][-1]
    found = debug.get(f"/debug/requests/{first['id']}").json()
    names = [piece["name"] for piece in found["pieces"]]
    assert names.index("queue") < names.index("prefill") < names.index("decode") < names.index("host")
    begins = [piece["began_ms"] for piece in found["pieces"]]
    assert begins == sorted(begins)
    error_of(debug.get("/debug/requests/req-0"), 404)


def test_steps_tell_what_they_held_and_their_padding(debug: httpx.Client, used: Running) -> None:
    table = debug.get("/debug/steps", params={"n": 1000}).json()
    steps = table["steps"]
    assert [step["number"] for step in steps] == list(range(1, table["num_steps"] + 1))
    assert sum(step["tokens"] for step in steps) > len(CANARY) * 5
    assert all(step["padding"] == step["bucket"] - step["tokens"] >= 0 for step in steps)
    assert {step["tokens"] for step in steps} >= {32}  # a chunk of the long prompt
    assert all(step["launched_at"] <= step["landed_at"] for step in steps)
    assert debug.get("/debug/steps", params={"n": 2}).json()["steps"] == steps[-2:]


@pytest.mark.parametrize("count", ["0", "-1", "x", "1e3", "99999999999999", "513", "²"])
def test_a_count_that_is_none_is_refused(debug: httpx.Client, count: str) -> None:
    assert error_of(debug.get("/debug/requests", params={"n": count}), 400)["param"] == "n"


@pytest.mark.parametrize("path", ["/debug/requests", "/debug/steps", "/debug/trace"])
def test_a_query_that_is_not_known_is_refused(debug: httpx.Client, path: str) -> None:
    error = error_of(debug.get(path, params={"n": 2, "steps": 5}), 400)
    assert (error["param"], error["message"]) == ("steps", "the query 'steps' is not known here: only n is")


def test_the_trace_follows_the_event_format(debug: httpx.Client) -> None:
    """As chrome://tracing and ui.perfetto.dev read it: complete, async and metadata events; nesting on each track."""
    answer = debug.get("/debug/trace", params={"n": 1000})
    assert CANARY not in answer.text
    trace = answer.json()
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    pairs: dict[int, list[str]] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "X":
                assert event["ts"] >= 0
                assert event["dur"] >= 0
                tracks.setdefault((event["pid"], event["tid"]), []).append(event)
            case "b" | "e":
                assert event["cat"] == "step"
                pairs.setdefault(event["id"], []).append(event["ph"])
            case kind:
                assert kind == "M"
                assert event["args"]["name"]
    assert pairs
    assert all(kinds == ["b", "e"] for kinds in pairs.values())
    for events in tracks.values():
        check_nesting(sorted(events, key=lambda event: (event["ts"], -event["dur"])))
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"plan", "pack", "launch", "wait", "commit", "queue", "prefill", "decode", "/v1/completions"} <= names


def check_nesting(events: list[dict[str, Any]]) -> None:
    """An event lies in the one before it, or after it: half-way over another, a viewer would show it wrongly."""
    open_ends: list[float] = []
    for event in events:
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_ends and open_ends[-1] <= begin + 1:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1, event
        open_ends.append(end)


def test_the_dashboard_shows_metrics_that_are_there(used: Running) -> None:
    page = used.metrics()
    shown = set(re.findall(r"^(ostinato:\w+)", page, flags=re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    wanted = {name for query in queries for name in re.findall(r"ostinato:\w+", query)}
    assert len(wanted) > 15
    assert wanted <= shown, wanted - shown
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert CANARY not in page


def test_the_example_of_a_scrape_names_our_page(used: Running) -> None:
    table = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = table["scrape_configs"]
    with used.metrics_client() as client:
        assert client.get(job["metrics_path"]).status_code == 200
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:8001"]


def test_metrics_of_calls_have_the_field_s_names(used: Running) -> None:
    """vLLM's names under our prefix, each with as many values as calls or choices had it."""
    values = dict(line.rsplit(" ", 1) for line in used.metrics().splitlines() if not line.startswith("#"))
    for name in ("queue", "prefill", "decode", "inference"):
        assert float(values[f"ostinato:request_{name}_time_seconds_count"]) == 5
    assert float(values["ostinato:request_prompt_tokens_count"]) == 6
    assert float(values["ostinato:request_generation_tokens_sum"]) == 4 + 6 + 3
    assert float(values["ostinato:request_time_per_output_token_seconds_count"]) == 5
    assert float(values["ostinato:iteration_tokens_total_sum"]) > 100
    assert float(values['ostinato:request_span_seconds_count{span="decode_execute"}']) == 3
    assert {name for name in values if name.startswith("ostinato:num_requests_waiting_by_reason")} == {
        f'ostinato:num_requests_waiting_by_reason{{reason="{reason}"}}'
        for reason in ("turn", "slots", "blocks", "budget", "tenant")
    }


def test_calls_that_are_turned_away_are_counted_by_reason(tmp_path: Path) -> None:
    limits = make_limits(max_rows=1)
    gated = GatedLM(PosLM(limits, VOCAB_SIZE))
    with serving(tmp_path, limits, gated, max_waiting=0) as server, server.client() as client:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(complete, client, max_tokens=1)
            gated.await_step()
            assert complete(client).status_code == 429
            gated.permit()
            assert first.result().status_code == 200
        assert 'ostinato:admission_rejections_total{reason="queue_full"} 1.0' in server.metrics()

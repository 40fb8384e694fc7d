"""What the console reads: blocks add up to the pool, states are right under sharing and preemption, no text is told."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from ostinato.runtime.console_state import KEEP_SECONDS, ConsoleState, engine_json, steps_json
from ostinato.runtime.engine_view import BLOCK_STATES, MAX_ROWS_SHOWN, EngineView, run_lengths
from ostinato.runtime.flight import StepTimes
from ostinato.runtime.latency_series import BIN_SECONDS, NUM_BINS, Latencies, LatencySeries
from ostinato.runtime.ledger import Ledger
from ostinato.runtime.metrics import Metrics
from ostinato.runtime.pages import NULL_BLOCK
from ostinato.runtime.request import Request, SamplingParams
from ostinato.runtime.step_log import StepRecord
from tests.fakes import Desk, PosLM, bucket_rules, make_limits, make_request
from tests.http_calls import LIMITS
from tests.scheduling import VOCAB, prompt_of
from tests.serving import VOCAB_SIZE, GatedLM, Running, await_true, serving

SIZE = 16
CANARY = "canary-7f3a"


def view_of(desk: Desk, requests: list[Request]) -> EngineView:
    return EngineView.of(desk.scheduler, requests, "turn")


def states_of(view: EngineView) -> str:
    return "".join(BLOCK_STATES[code] for code in view.block_states())


def decoded(lengths: str) -> str:
    return "".join(letter * int(number) for letter, number in re.findall(r"([a-z])(\d+)", lengths))


def test_blocks_and_rows_through_a_life_with_sharing() -> None:
    limits = make_limits(max_rows=4, max_step_tokens=SIZE, max_context=128, num_blocks=12)
    desk = Desk(limits, VOCAB)
    prompt = prompt_of(1, 3 * SIZE)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    first, second = (make_request(number, prompt, params, limits) for number in (1, 2))
    desk.submit(first)
    assert [row.state for row in view_of(desk, [first]).rows] == ["queue"]
    assert states_of(view_of(desk, [first])) == "n" + "f" * 12
    desk.step()  # one chunk of three
    (row,) = view_of(desk, [first]).rows
    assert (row.state, row.num_prompt, row.num_computed, row.num_output, row.num_blocks) == ("prefill", 48, 16, 0, 3)
    assert Counter(states_of(view_of(desk, [first]))) == {"n": 1, "p": 3, "f": 9}
    desk.step()
    desk.step()
    desk.submit(second)
    desk.step()
    rows = view_of(desk, [second, first]).rows
    assert {row.id: row.state for row in rows} == {1: "decode", 2: "decode"}
    assert next(row for row in rows if row.id == 2).num_cached == 2 * SIZE  # the last prompt token is always computed
    counts = Counter(states_of(view_of(desk, [first, second])))
    assert (counts["s"], counts["n"]) == (2, 1)
    desk.run()
    assert view_of(desk, [first, second]).rows == ()
    counts = Counter(states_of(view_of(desk, [first, second])))
    assert counts["p"] == counts["s"] == 0
    assert counts["c"] > 0
    assert counts.total() == limits.num_blocks


@pytest.mark.parametrize("seed", range(4))
def test_counts_add_up_in_any_history(seed: int) -> None:
    """Blocks in the view against the blocks that requests hold, step by step, in a pool that preempts."""
    rng = random.Random(seed)
    limits = make_limits(max_rows=6, max_step_tokens=32, max_context=128, num_blocks=14)
    desk = Desk(limits, VOCAB)
    requests: list[Request] = []
    were_preempted = 0
    for number in range(1, 41):
        prompt = prompt_of(rng.randrange(3), rng.randrange(1, 60))
        requests.append(make_request(number, prompt, SamplingParams(max_tokens=rng.randrange(1, 60), seed=1), limits))
        desk.submit(requests[-1])
        for _ in range(rng.randrange(8)):
            desk.step()
            view = view_of(desk, requests)
            holders = Counter(block for request in requests for block in request.blocks)
            states = states_of(view)
            assert len(states) == limits.num_blocks
            assert states[NULL_BLOCK] == "n"
            assert {block for block, state in enumerate(states) if state == "p"} == {
                block for block, count in holders.items() if count == 1
            }
            assert {block for block, state in enumerate(states) if state == "s"} == {
                block for block, count in holders.items() if count > 1
            }
            table = engine_json(view)
            assert decoded(table["blocks"]["map"]) == states
            assert sum(table["blocks"]["counts"].values()) == limits.num_blocks
            assert (
                table["blocks"]["counts"]["cached"] + table["blocks"]["counts"]["free"] == desk.scheduler.pages.num_free
            )
            assert sum(row.num_blocks for row in view.rows) == holders.total()
            assert len(view.rows) == view.num_running + view.num_waiting
            assert sum(row.state == "queue" for row in view.rows) == view.num_waiting
            were_preempted += sum(row.state == "queue" and row.num_preemptions > 0 for row in view.rows)
    assert were_preempted, "the pool was meant to be too small"


def test_a_block_that_very_many_hold_is_shared() -> None:
    view = view_of(Desk(make_limits(num_blocks=8), VOCAB), [])
    view = replace(view, holders=[0, 1, 2, 255, 256, 1000, 0, 0, 0], cached=[7])
    assert states_of(view) == "npssssfcf"


def test_long_lines_are_cut_and_counted() -> None:
    limits = make_limits()
    desk = Desk(limits, VOCAB)
    requests = [make_request(number, [1], SamplingParams(max_tokens=4), limits) for number in range(MAX_ROWS_SHOWN + 9)]
    desk.submit(*requests)
    desk.step()
    view = view_of(desk, list(reversed(requests)))
    assert len(view.rows) == MAX_ROWS_SHOWN
    assert view.num_hidden == 9
    assert [row.state != "queue" for row in view.rows] == [True] * 8 + [False] * (MAX_ROWS_SHOWN - 8)


def test_run_lengths_say_every_map() -> None:
    rng = random.Random(3)
    for _ in range(50):
        states = bytes(rng.choices(range(len(BLOCK_STATES)), [9, 1, 1, 1, 1], k=rng.randrange(1, 300)))
        text = run_lengths(states)
        assert decoded(text) == "".join(BLOCK_STATES[code] for code in states)
        assert not re.search(r"([a-z])\d+\1", text), "two runs of one state follow each other"


def test_steps_by_bucket() -> None:
    steps = [
        StepRecord(number, StepTimes(3, tokens, 3, *[0.0] * 8), bucket, bucket)
        for number, (tokens, bucket) in enumerate([(3, 4), (4, 4), (7, 8)])
    ]
    assert steps_json(steps) == {
        "steps": 3,
        "buckets": [
            {"bucket": 4, "steps": 2, "tokens": 7, "padding": 1},
            {"bucket": 8, "steps": 1, "tokens": 7, "padding": 1},
        ],
    }


def test_latency_bins_and_quantiles() -> None:
    rng = random.Random(5)
    now = 1000.0
    series = LatencySeries(lambda: now)
    values = [rng.lognormvariate(-4, 1) for _ in range(2000)]
    for value in values:
        series.observe(value)
    (point,) = series.points()
    values.sort()
    assert point.num_values == 2000
    assert point.p50 == pytest.approx(values[999], rel=0.1)
    assert point.p99 == pytest.approx(values[1979], rel=0.1)
    now += BIN_SECONDS
    series.observe(0.0)  # below what a bin tells apart
    assert [point.num_values for point in series.points()] == [2000, 1]
    assert [point.age for point in series.points()] == [BIN_SECONDS, 0.0]
    now += (NUM_BINS - 1) * BIN_SECONDS
    assert [point.num_values for point in series.points()] == [1]
    now += BIN_SECONDS
    assert series.points() == []


def chat(server: Running, **fields: object) -> httpx.Response:
    messages = [{"role": "user", "content": CANARY}]
    with server.client() as client:
        return client.post("/v1/chat/completions", json={"model": "toy", "messages": messages} | fields)


def test_the_route_tells_what_happened_and_no_text(tmp_path: Path) -> None:
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server, server.metrics_client() as client:
        response = chat(server, max_tokens=9, ignore_eos=True)
        assert response.status_code == 200
        await_true(lambda: len(server.bridge.ledger.recent.last()) > 0, "the call was not kept")
        answer = client.get("/debug/state")
        state = answer.json()
        assert state["model"] == "toy"
        assert state["trouble"] is None
        assert state["limits"]["num_blocks"] == LIMITS.num_blocks
        assert sum(bucket["steps"] for bucket in state["steps"]["buckets"]) == state["steps"]["steps"] >= 9
        (call,) = state["recent"]
        assert (call["status"], call["finish_reasons"], call["output_tokens"]) == (200, ["length"], 9)
        assert sum(call["spans_ms"].values()) == pytest.approx(call["total_ms"], abs=1e-2)
        assert call == client.get("/debug/requests").json()["requests"][0]
        assert state["latency"]["first_token"][0]["num_values"] == 1
        assert sum(point["num_values"] for point in state["latency"]["between_tokens"]) == 8
        assert CANARY not in answer.text
        said = response.json()["choices"][0]["message"]["content"]
        assert said not in answer.text


def test_a_step_that_takes_long_delays_no_page(tmp_path: Path) -> None:
    """The state of before comes with its age, and the new one once the step has ended."""
    gated = GatedLM(PosLM(LIMITS, VOCAB_SIZE))
    with serving(tmp_path, LIMITS, gated) as server, server.metrics_client() as client:
        before = client.get("/debug/state").json()
        assert before["engine"]["rows"] == []
        body = {"model": "toy", "prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": True}
        with server.client() as caller, caller.stream("POST", "/v1/completions", json=body) as response:
            gated.await_step()
            await_true(lambda: client.get("/debug/state").json()["age_seconds"] > 1.0, "the state is still new")
            assert client.get("/debug/state").json()["engine"]["rows"] == []  # of before
            gated.permit()  # the look that waited is answered between the steps
            gated.await_step()
            await_true(lambda: len(client.get("/debug/state").json()["engine"]["rows"]) == 1, "no row is seen")
            gated.permit(2)
            response.read()
        server.await_idle()


class LookedAt:
    """Stands for door, served model and bridge: counts looks, which fail while `is_bad`."""

    name = "toy"
    limits = LIMITS

    def __init__(self, view: EngineView) -> None:
        self.bridge = self
        self.ledger, self.latencies = Ledger(Metrics(), LIMITS, bucket_rules(LIMITS)), Latencies()
        self.num_looks = 0
        self.is_bad = False
        self._view = view

    def served(self) -> LookedAt:
        return self

    def trouble(self) -> None: ...

    def look(self) -> asyncio.Future[EngineView]:
        self.num_looks += 1
        seen: asyncio.Future[EngineView] = asyncio.get_running_loop().create_future()
        outcome = partial(seen.set_exception, ValueError("x")) if self.is_bad else partial(seen.set_result, self._view)
        asyncio.get_running_loop().call_soon(outcome)
        return seen


def test_pages_that_ask_at_once_share_one_look(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    looked_at = LookedAt(view_of(Desk(LIMITS, VOCAB), []))

    async def ask() -> None:
        nonlocal now
        state = ConsoleState(looked_at, lambda: now)  # type: ignore[arg-type]
        answers = await asyncio.gather(*(state.snapshot() for _ in range(20)))
        assert looked_at.num_looks == 1
        assert all(answer["engine"] == answers[0]["engine"] for answer in answers)
        now += KEEP_SECONDS / 2
        assert (await state.snapshot())["age_seconds"] == KEEP_SECONDS / 2
        assert looked_at.num_looks == 1
        now += KEEP_SECONDS
        assert (await state.snapshot())["age_seconds"] == 0.0
        assert looked_at.num_looks == 2
        looked_at.is_bad = True
        now += 5.0
        assert (await state.snapshot())["age_seconds"] == 5.0  # what was seen before
        assert "could not be looked at" in caplog.text
        looked_at.is_bad = False
        assert (await state.snapshot())["age_seconds"] == 0.0

    asyncio.run(ask())


def test_files_come_with_a_policy_and_from_the_package_alone(tmp_path: Path) -> None:
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server, server.metrics_client() as client:
        page = client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        names = re.findall(r'(?:src|href)="console/([^"]+)"', page.text)
        assert {"main.js", "paper.css"} <= set(names)
        assert not re.search(r"https?://|<script>|<style|\sstyle=|\son\w+=", page.text)
        folder = Path(__file__).parents[2] / "runtime" / "console"
        for path in folder.iterdir():
            file = client.get(f"/console/{path.name}")
            assert file.content == path.read_bytes()
            policy = file.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert file.headers["x-content-type-options"] == "nosniff"
            outside = re.sub(r"http://www\.w3\.org/2000/svg", "", file.text)
            assert "://" not in outside, f"{path.name} names another place"
            for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
                assert sink not in outside, f"{path.name} has {sink}"
        for name in ("..%2fserver.py", "%2e%2e/server.py", "server_console.py", "x", "..%2f..%2fetc%2fpasswd", "%00"):
            assert client.get(f"/console/{name}").status_code in (400, 404)
        with server.client() as api:
            assert api.get("/").status_code == 404  # not on the API's port
            assert api.get("/debug/state").status_code == 404

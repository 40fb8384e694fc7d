"""The API against its own description: generated requests that fit it and that do not, each answered as it says."""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import pytest
import requests
import schemathesis
from schemathesis.checks import CHECKS, load_all_checks

from ostinato.runtime.serve_limits import ServeLimits
from tests.fakes import PosLM, make_limits
from tests.scale import IS_SOAK, scaled
from tests.serving import ANY_PORTS, PATIENCE_SECONDS, VOCAB_SIZE, Running, serving

pytestmark = pytest.mark.timed

LIMITS = make_limits(max_rows=8, max_step_tokens=128, max_context=128)
CONFIG = replace(ANY_PORTS, limits=ServeLimits(max_choices=4, max_prompts=2))
NUM_CASES = scaled(200, 3000)  # a seed
SEEDS = [1, 2] if IS_SOAK else [1]
MAX_REFUSAL_SECONDS = 2.0  # asked of a machine that does nothing else
SENT = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
TOLD = ("/v1/models", "/v1/models/{name}", "/info", "/openapi.json", "/health", "/health/ready")
Case = schemathesis.Case[Any]
NEEDED = ("model", "prompt", "messages", "input", "tokens")
PLACES = hypothesis.strategies.lists(hypothesis.strategies.integers(0, 10**6), max_size=4)
WANTED = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection",
)  # fmt: skip


schemathesis.openapi.format("json-object", hypothesis.strategies.sampled_from(["{}", '{"a": [1, "b"]}']))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    executor = PosLM(LIMITS, VOCAB_SIZE)
    with serving(tmp_path_factory.mktemp("toy"), LIMITS, executor, config=CONFIG) as server:
        yield server


@cache
def checks() -> list[Any]:
    load_all_checks()
    return list(CHECKS.get_by_names(WANTED))


def fuzz(running: Running, path: str, num_cases: int, seed: int) -> dict[int, list[float]]:
    """The seconds of the answers of each status."""
    schema = schemathesis.openapi.from_url(running.url + "/openapi.json")
    operation = schema[path]["POST" if path in SENT else "GET"]
    modes = [mode for mode in schemathesis.GenerationMode if path in SENT or mode.is_positive]
    statuses: dict[int, list[float]] = {}
    with requests.Session() as session:
        for mode in modes:
            settings = hypothesis.settings(
                max_examples=max(1, num_cases // len(modes)),
                deadline=None,
                database=None,
                phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )

            @hypothesis.seed(seed)
            @settings
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode), places=PLACES)
            def answers(case: Case, places: list[int]) -> None:
                began_at = time.monotonic()
                status = answered(session, case, places)
                statuses.setdefault(status, []).append(time.monotonic() - began_at)

            answers()
    return statuses


def answered(session: requests.Session, case: Case, places: list[int]) -> int:
    """The status of one case, which is answered as described."""
    assert case.meta is not None
    if case.meta.generation.mode.is_positive and places:
        case.body = thinned(case.body, places)
    response = case.call(session=session, timeout=PATIENCE_SECONDS)
    case.validate_response(response, checks=checks())
    if response.headers["content-type"][0].startswith("text/event-stream"):
        check_events(case, response.content.decode())
    status: int = response.status_code
    return status


def check_events(case: Case, text: str) -> None:
    """The JSON inside of events, which is only described as what their text holds."""
    described = case.operation.definition.raw["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]
    data = described["properties"]["data"]
    validator = jsonschema.Draft202012Validator(data.get("anyOf", [data])[-1]["contentSchema"])
    payloads = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    assert payloads
    for payload in payloads:
        validator.validate(json.loads(payload))


def thinned(body: Any, places: list[int]) -> Any:
    """What must be there and a few fields more: all fields at once seldom agree with each other."""
    if not isinstance(body, dict):
        return body
    kept = {sorted(body)[place % len(body)] for place in places} if body else set()
    return {name: value for name, value in body.items() if name in kept or name in NEEDED}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("path", SENT)
def test_what_is_sent_is_taken_or_refused_as_described(running: Running, path: str, seed: int) -> None:
    statuses = fuzz(running, path, NUM_CASES * 9 // 10 // len(SENT), seed)
    assert statuses.get(200), "nothing that fits the description was taken"
    assert statuses.get(400), "nothing that does not was refused"
    slowest = max(statuses[400])
    print(f"the slowest refusal took {slowest:.2f} s")
    assert not IS_SOAK or slowest <= MAX_REFUSAL_SECONDS
    running.await_idle()


@pytest.mark.parametrize("path", TOLD)
def test_what_tells_of_the_server_answers_as_described(running: Running, path: str) -> None:
    assert set(fuzz(running, path, max(1, NUM_CASES // 10 // len(TOLD)), 1)) == {200}


def test_every_route_is_described_and_no_other(running: Running) -> None:
    described = requests.get(running.url + "/openapi.json", timeout=PATIENCE_SECONDS).json()["paths"]
    assert set(described) == {*SENT, *TOLD}
    app: Any = running.server.config.app
    routes = {route.path.replace(":path", "") for route in app.routes}
    assert routes == set(described)


def test_every_status_that_is_raised_is_described(running: Running) -> None:
    raised = {405, 500}  # the framework's own, and what nobody foresaw
    for path in (Path(__file__).parents[2] / "runtime").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("HttpError", "Refusal"):
                statuses = (first.value for first in node.args[:1] if isinstance(first, ast.Constant))
                raised |= {status for status in statuses if isinstance(status, int)}
    paths = requests.get(running.url + "/openapi.json", timeout=PATIENCE_SECONDS).json()["paths"]
    described = {int(status) for path in paths.values() for way in path.values() for status in way["responses"]}
    assert {400, 404, 413, 429, 503} <= raised
    assert raised - {405} <= described

"""The demo model served from the GPU targets' forms on the simulated device: the CPU target's tokens, streamed."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from ostinato.builder.pipeline import build
from ostinato.engines.recipe import read_recipe

from ..builder.conftest import Silent
from ..scale import only_in_a_soak
from ..serving import reserved_port
from .standin_builds import build_simulated

ROOT = Path(__file__).parent.parent.parent
PROMPTS = (
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "In 1969,",
    "The quick brown fox", "To bake a cake, you", "My favourite book", "SELECT name FROM", "The mitochondria",
    "Dear Sir or Madam,", "1, 1, 2, 3, 5, 8,", "Photosynthesis is", "import numpy as np\n", "The Roman empire",
    "Roses are red,", "How do I", "A triangle has", "Q: What is the largest planet?\nA:", "Der Hund",
    "The function f(x) = x^2", "<html><body>", "Once there was a king who had three daughters, and each of them",
    "Gravity",
)  # fmt: skip
TOKENS = 32
PATIENCE_S = 300
SERVE = ("--max-rows", "8", "--max-context", "1024", "--kv-tokens", "4096")

pytestmark = [only_in_a_soak, pytest.mark.xdist_group("demo model")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in float32 for each target."""
    folder = tmp_path_factory.mktemp("store")
    for target in ("cpu", "rtx", "trt"):
        recipe = read_recipe(ROOT / "engines" / "recipes" / f"smollm2-135m-{target}.toml")
        recipe = replace(recipe, weights="float32", kv_cache="float32", gpu="")
        if target == "cpu":
            build(recipe, folder / target, Silent())
        else:
            recipe = replace(recipe, compute_capabilities=("12.0",) if target == "rtx" else ("9.0",))
            build_simulated(recipe, folder / target, (12, 0) if target == "rtx" else (9, 0))
    return folder


@contextmanager
def served(bundle: Path) -> Iterator[tuple[str, str]]:
    """`ostinato serve` in a process of its own; gives its addresses, the second for metrics."""
    with reserved_port() as port, reserved_port() as metrics_port:
        command = [sys.executable, "-m", "tests.sim.serve_simulated", str(bundle), *SERVE]
        command += ["--port", str(port), "--metrics-port", str(metrics_port)]
        process = subprocess.Popen(command, cwd=ROOT)
        url = f"http://127.0.0.1:{port}"
        try:
            end = time.monotonic() + PATIENCE_S
            while not _is_ready(url):
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < end, "the server does not get ready"
                time.sleep(0.2)
            yield url, f"http://127.0.0.1:{metrics_port}"
        finally:
            process.terminate()
            assert process.wait(PATIENCE_S) == 0


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health/ready").is_success
    except httpx.TransportError:
        return False


def streamed(url: str) -> list[tuple[str, ...]]:
    """Every prompt's tokens, eight prompts at a time."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    model = client.models.list().data[0].id

    def complete(prompt: str) -> tuple[str, ...]:
        stream = client.completions.create(
            model=model, prompt=prompt, max_tokens=TOKENS, temperature=0, logprobs=0, stream=True
        )
        parts = [choice.logprobs for chunk in stream for choice in chunk.choices]
        return tuple(token for part in parts if part is not None for token in part.tokens or ())

    with client, ThreadPoolExecutor(8) as pool:
        return list(pool.map(complete, PROMPTS))


def graph_steps(url: str) -> dict[str, float]:
    """What /metrics counts of steps: "decode replayed" and so on."""
    found = re.findall(r"graph_steps_total\{(.*?)\} (\S+)", httpx.get(url + "/metrics").text)
    return {labels: float(count) for labels, count in found}


@pytest.fixture(scope="module")
def wanted(store: Path) -> list[tuple[str, ...]]:
    with served(store / "cpu") as (url, _):
        return streamed(url)


@pytest.mark.parametrize("target", ["rtx", "trt"])
def test_served_tokens_are_those_of_the_cpu(store: Path, wanted: list[tuple[str, ...]], target: str) -> None:
    assert [len(tokens) for tokens in wanted].count(TOKENS) > len(PROMPTS) / 2
    with served(store / target) as (url, metrics_url):
        assert streamed(url) == wanted
        steps = graph_steps(metrics_url)
    assert sum(steps.values()) >= TOKENS
    assert not any(count for labels, count in steps.items() if "eager" in labels)

"""A bundle's target decides who runs it; what does not fit the machine is refused in one line, before it is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ostinato.engines.command import main
from ostinato.engines.errors import BundleError, RecipeError
from ostinato.engines.processor import KERNEL_NEEDS
from ostinato.runtime.config import RuntimeConfig
from ostinato.runtime.llm import LLM
from ostinato.runtime.metrics import Metrics
from ostinato.runtime.request import SamplingParams
from ostinato.runtime.shop import check_shop, open_shop
from tests.bundles import random_prompts
from tests.engines.made import make, make_gpu, make_x86
from tests.sim.sim_bundle import SimulatedRank, simulated
from tests.sim.standin_builds import tiny_bundle
from tests.sim_desk import silent

PROMPTS = random_prompts(6, [4, 11, 30])
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rtx")
    tiny_bundle(folder)
    return folder / "bundle"


@pytest.fixture
def rank(path: Path) -> SimulatedRank:
    return simulated(path)


@pytest.mark.parametrize(
    ("command", "options"), [("generate", ["--prompt", "x"]), ("chat", ["--prompt", "x"]), ("serve", ["--port", "0"])]
)
def test_a_gpu_bundle_is_refused_where_no_gpu_is(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    options: list[str],
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    path = make_gpu(tmp_path / "b").path
    assert main([command, str(path), *options]) == 2
    printed = [line for line in capfd.readouterr().err.splitlines() if line]
    assert printed == [
        f"ostinato {command}: the bundle is for target rtx, this machine has no NVIDIA driver: run it on a GPU of "
        "compute capability 8.6 or 8.9, or build for target cpu"
    ]


def test_an_x86_bundle_is_refused_where_the_processor_lacks_instructions(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    flags = frozenset(KERNEL_NEEDS["cpu_flags"].split()) - {"avx512_vnni"}
    monkeypatch.setattr("ostinato.runtime.machine.find_cpu_flags", lambda: flags)
    assert main(["generate", str(make_x86(tmp_path / "b").path), "--prompt", "x"]) == 2
    printed = [line for line in capfd.readouterr().err.splitlines() if line]
    assert printed == [
        "ostinato generate: the bundle is for target x86, this machine lacks avx512_vnni: build with a recipe of "
        "target cpu, which runs on any x86-64, or run it on a processor with AVX-512 VNNI"
    ]


def test_an_llm_generates_from_a_gpu_bundle(path: Path, rank: SimulatedRank) -> None:
    with LLM(path, progress=False, libraries=rank.libraries()) as llm:
        found = llm.generate(PROMPTS, GREEDY)
        (alone,) = llm.generate(PROMPTS[:1], GREEDY)
    assert all(len(one.choices[0].token_ids) == 5 for one in found)
    assert found[0].choices[0].token_ids == alone.choices[0].token_ids
    assert rank.driver.alive() == []


def test_what_was_replayed_is_on_the_metrics_page(path: Path, rank: SimulatedRank) -> None:
    shop = open_shop(path, RuntimeConfig(strict_graphs=True), silent, libraries=rank.libraries())
    assert shop.coverage is not None
    metrics = Metrics()
    metrics.watch_graphs(shop.coverage)
    for request in shop.intake.requests(PROMPTS[0], GREEDY):
        shop.loop.submit(request)
    for _ in shop.loop.run_until_idle():
        pass
    page = dict(line.rsplit(" ", 1) for line in metrics.exposition().decode().splitlines() if line[0] != "#")
    steps = "ostinato:graph_steps_total"
    assert float(page[steps + '{mode="replayed",phase="prefill"}']) == 1
    assert float(page[steps + '{mode="replayed",phase="decode"}']) == 4
    assert float(page[steps + '{mode="eager",phase="decode"}']) == 0
    assert 0 < float(page["ostinato:graph_padding_share"]) < 1
    assert float(page["ostinato:graph_memory_bytes"]) == sum(shop.coverage.graph_bytes.values()) > 0
    shop.loop.close()


def test_machine_and_bundle_are_held_together_before_anything_is_loaded(path: Path, rank: SimulatedRank) -> None:
    check_shop(path, RuntimeConfig(), rank.libraries())
    rank.driver.capability = (9, 0)
    rank.driver.calls.clear()
    told = r"Simulated GPU has compute capability 9.0, the bundle was built for 12.0"
    with pytest.raises(BundleError, match=told):
        check_shop(path, RuntimeConfig(), rank.libraries())
    with pytest.raises(BundleError, match=told):
        open_shop(path, RuntimeConfig(), silent, libraries=rank.libraries())
    assert not rank.driver.calls["cuDevicePrimaryCtxRetain"]


def test_logits_of_a_gpu_are_not_observed(path: Path, rank: SimulatedRank) -> None:
    with pytest.raises(BundleError, match="is for target rtx, whose logits stay on the GPU"):
        open_shop(path, RuntimeConfig(), silent, lambda logits: None, rank.libraries())


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"max_rows": 9}, "max_rows is 9, the bundle was built for 8: give less, or build it with --set limits.max_ro"),
        ({"max_step_tokens": 65}, "max_step_tokens is 65, the bundle was built for 64"),
        ({"max_context": 97}, "max_context is 97, the bundle was built for 96"),
    ],
)
def test_more_than_was_built_is_refused(path: Path, rank: SimulatedRank, choice: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        check_shop(path, RuntimeConfig(**choice), rank.libraries())


def test_more_blocks_are_taken_where_no_engine_holds_the_cache(path: Path, rank: SimulatedRank) -> None:
    limits = RuntimeConfig(kv_tokens=1024).limits(rank.bundle.manifest)
    with LLM(
        path,
        RuntimeConfig(kv_tokens=1024, max_rows=3),
        progress=False,
        libraries=simulated(path, limits=limits).libraries(),
    ) as llm:
        assert llm.limits.kv_tokens == 1024
        assert len(llm.generate(PROMPTS, GREEDY)) == 3


def test_a_cpu_bundle_takes_other_limits_but_no_longer_context(tmp_path: Path) -> None:
    """Its tables of angles end where it was built for: past them it would answer, and wrongly."""
    path = make(tmp_path / "b").path
    check_shop(path, RuntimeConfig(max_rows=40, max_step_tokens=80, max_context=96, kv_tokens=4096))
    with pytest.raises(RecipeError, match="max_context is 97, the bundle was built for 96: give less, or build it"):
        check_shop(path, RuntimeConfig(max_context=97))


def test_strict_graphs_are_refused_on_a_cpu(tmp_path: Path) -> None:
    path = make(tmp_path / "b").path
    with pytest.raises(RecipeError, match="strict graphs are for GPU bundles, made is for target cpu: drop them"):
        check_shop(path, RuntimeConfig(strict_graphs=True))


@pytest.mark.parametrize("name", ["shop", "cuda_executor", "command", "llm"])
def test_one_target_needs_no_library_of_another(name: str) -> None:
    code = (
        f"import sys, ostinato.runtime.{name}; print([m for m in ('openvino', 'tensorrt', 'cuda') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "[]"

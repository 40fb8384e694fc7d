"""`ostinato diff` names every difference by kind, and fails on those that were asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.engines.bundle import Bundle, publish, unfinished_bundle
from ostinato.engines.diff import diff
from ostinato.engines.difference import differences_of
from ostinato.engines.engine_record import EngineProfile
from ostinato.engines.errors import BundleError, OstinatoError
from ostinato.engines.facts import KINDS
from ostinato.engines.inspect import inspect
from ostinato.engines.memory_table import Latency
from ostinato.engines.program import KernelInfo

from .made import LIMITS, engines_of, fill_gpu, gpu_manifest_of, make, make_gpu


@pytest.fixture
def base(tmp_path: Path) -> Bundle:
    return make_gpu(tmp_path / "a")


def _slower(milliseconds: float) -> dict[str, Any]:
    return {"latency": {"decode 1": Latency(milliseconds, None, "roofline of l4")}}


_FIRST, _SECOND = engines_of(0)
_CHANGES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("target", {"compute_capabilities": ("8.9",)}, {"compute_capabilities"}),
    ("model", {"eos_ids": (1,)}, {"eos_ids"}),
    ("precision", {"kv_cache": "int8"}, {"kv_cache"}),
    ("size", {"weight_bytes": 701}, {"weights"}),
    ("limits", {"limits": dataclasses.replace(LIMITS, max_context=90)}, {"max_context"}),
    ("memory", {"kv_bytes_per_block": 8192}, {"kv_bytes_per_block"}),
    ("latency", _slower(1.5), {"decode 1 predicted"}),
    ("toolchain", {"toolchain": {"numpy": "3"}}, {"numpy"}),
    ("notes", {"notes": ("another",)}, {"a note", "another"}),
    (
        "graph",
        {"engines": ((_FIRST, dataclasses.replace(_SECOND, operators={"Gemm": 3}, graph_digest="x")), engines_of(1))},
        {"rank0/segment_01.engine graph", "rank0 Gemm", "rank0 RMSNormalization"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "what"), _CHANGES, ids=[kind for kind, _, _ in _CHANGES])
def test_a_difference_is_of_its_kind_and_of_no_other(
    tmp_path: Path, base: Bundle, kind: str, changes: dict[str, Any], what: set[str]
) -> None:
    other = make_gpu(tmp_path / "b", **changes)
    found = differences_of(base, other)
    assert {(difference.kind, difference.what) for difference in found} == {(kind, name) for name in what}
    paths = [str(base.path), str(other.path)]
    assert diff([*paths, "--fail-on", kind]) == 1
    assert diff(paths) == 0
    assert diff([*paths, "--fail-on", ",".join(set(KINDS) - {kind})]) == 0


def test_a_kernel_that_spills_is_a_difference(tmp_path: Path, base: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    with unfinished_bundle(tmp_path / "b") as folder:
        fill_gpu(folder, KernelInfo("attend", 4, 1024, 2, 255, 16))
        publish(folder, tmp_path / "b", gpu_manifest_of(folder))
    assert diff([str(base.path), str(tmp_path / "b"), "--fail-on", "kernels"]) == 1
    lines = list(map(str.split, capsys.readouterr().out.splitlines()))
    assert ["!", "rank0", "sm_86", "attend_0", "registers", "96", "→", "255", "+165.6%"] in lines
    assert ["!", "rank0", "sm_86", "attend_0", "spill_bytes", "0", "→", "16"] in lines


def test_differences_are_told_as_people_write_them(
    tmp_path: Path, base: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = EngineProfile("decode", {"hidden": ((1, 64), (4, 64), (16, 64))})
    engines = ((dataclasses.replace(_FIRST, profiles=(profile,), graph_digest="ab" * 32), _SECOND), engines_of(1))
    other = make_gpu(tmp_path / "b", engines=engines, weight_bytes=7700, notes=("another",))
    assert diff([str(base.path), str(other.path), "--fail-on", "size"]) == 1
    told = capsys.readouterr().out
    assert told.startswith(f"A  {base.path}\nB  {other.path}\n\ngraph\n  rank0/segment_00.engine graph  ")
    assert told.endswith(" differences, 1 that --fail-on forbids (!)\n")
    for line in (
        "\nsize\n! weights  700 → 7,700  +1000.0%\n",
        f" → {'ab' * 6}\n",
        " → hidden 1x64/4x64/16x64\n",
        "\nnotes\n  only in A: a note\n  only in B: another\n",
    ):
        assert line in told


def test_equal_bundles(base: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff([str(base.path), str(base.path), "--fail-on", ",".join(KINDS)]) == 0
    assert capsys.readouterr().out == "no difference\n"


@pytest.mark.parametrize(
    ("milliseconds", "limit", "code"),
    [
        (1.3, "latency:5%", 0),
        (1.3, "latency:4", 0),
        (1.3, "latency:3.9%", 1),
        (0.5, "latency:0%", 0),
        (0.5, "latency", 1),
    ],
)
def test_a_limit_forgives_what_shrinks_or_grows_a_little(
    tmp_path: Path, base: Bundle, milliseconds: float, limit: str, code: int
) -> None:
    other = make_gpu(tmp_path / "b", **_slower(milliseconds))  # from 1.25 ms
    assert diff([str(base.path), str(other.path), "--fail-on", limit]) == code


def test_a_limit_does_not_forgive_what_has_no_counterpart(tmp_path: Path, base: Bundle) -> None:
    other = make_gpu(tmp_path / "b", latency={})
    assert diff([str(base.path), str(other.path), "--fail-on", "latency:50%"]) == 1


def test_steps_are_told_in_the_order_of_their_sizes(
    tmp_path: Path, base: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = (1, 2, 16, 128)
    latency = {f"decode {count}": Latency(2.0, None, "roofline of l4") for count in counts}
    other = make_gpu(tmp_path / "b", latency=latency)
    found = [difference.what for difference in differences_of(base, other)]
    assert found == [f"decode {count} predicted" for count in counts]
    assert inspect([str(other.path), "--full"]) == 0
    told = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("latency, decode")]
    assert told == list(map(str, counts))


def test_json_has_it_whole(tmp_path: Path, base: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_gpu(tmp_path / "b", weight_bytes=770)
    assert diff([str(base.path), str(other.path), "--json", "--fail-on", "size:9%"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "first": str(base.path),
        "second": str(other.path),
        "failed": True,
        "differences": [
            {"kind": "size", "what": "weights", "first": 700, "second": 770, "growth": 10.0, "fails": True}
        ],
    }  # fmt: skip


def test_a_cpu_bundle_and_one_for_another_machine_compare(tmp_path: Path, base: Bundle) -> None:
    kinds = {difference.kind for difference in differences_of(make(tmp_path / "cpu"), base)}
    assert {"target", "precision", "size", "kernels", "memory", "latency", "toolchain"} <= kinds
    foreign = make_gpu(tmp_path / "b", hardware={"machine": "pdp11"})
    assert diff([str(base.path), str(foreign.path)]) == 0


@pytest.mark.parametrize("limit", ["speed", "latency:", "latency:fast", "latency:-1%", "latency:5%%", "size,size:5%"])
def test_a_limit_that_means_nothing_is_refused(base: Bundle, limit: str) -> None:
    with pytest.raises(OstinatoError, match="--fail-on"):
        diff([str(base.path), str(base.path), "--fail-on", limit])


def test_a_damaged_bundle_is_refused(tmp_path: Path, base: Bundle) -> None:
    other = make_gpu(tmp_path / "b")
    (other.path / "rank0" / "segment_00.engine").write_bytes(b"")
    with pytest.raises(BundleError, match=r"segment_00\.engine has 0 bytes"):
        diff([str(base.path), str(other.path)])

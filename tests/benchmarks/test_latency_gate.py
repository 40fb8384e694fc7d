"""The gate's plumbing with sides that need no model: turns, looks, exit codes, records."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gate_measure import Plan, Shape, measure
from gate_statistics import MIN_ROUNDS
from latency_gate import main
from latency_side import Side

ROOT = Path(__file__).resolve().parent.parent.parent
FAKE = Path(__file__).resolve().parent / "fake_side.py"


@pytest.fixture(autouse=True)
def _children_find_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))


def write_bundle(folder: Path, **manifest: Any) -> str:
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return str(folder)


def gate(tmp_path: Path, base: str, new: str, *more: str) -> int:
    options = ["--minutes", "0.001", "--pairs", "1", "--out", str(tmp_path / "out")]
    return main(["--base", base, "--new", new, *options, *more], child=FAKE)


def test_a_slower_bundle_fails_and_leaves_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = write_bundle(tmp_path / "a", step_ms=10), write_bundle(tmp_path / "b", step_ms=11)
    assert gate(tmp_path, base, new) == 1
    assert "regression: the lower bound is" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "latency_gate.json").read_text())
    assert record["verdict"] == "regression"
    assert record["looks"][-1]["estimate"] == pytest.approx(1.1, abs=0.02)
    assert (record["sides"]["base"]["bundle"], record["sides"]["new"]["bundle"]) == (base, new)
    assert record["command"]
    assert record["machine"]["cores"] > 0
    assert (tmp_path / "out" / "latency_gate.png").read_bytes().startswith(b"\x89PNG")


def test_an_equal_bundle_passes_at_the_first_looks_or_the_last(tmp_path: Path) -> None:
    base = write_bundle(tmp_path / "a", step_ms=10)
    assert gate(tmp_path, base, base) == 0


def test_a_slowdown_within_the_budget_passes(tmp_path: Path) -> None:
    base, new = write_bundle(tmp_path / "a", step_ms=10), write_bundle(tmp_path / "b", step_ms=11)
    assert gate(tmp_path, base, new, "--budget", "0.2") == 0


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ({"step_ms": 10, "fails": "prompt"}, "new could not prompt: ValueError: the prompt is too long"),
        ({"step_ms": 10, "fails": "decode"}, "new ended while it had to decode: out of memory"),
    ],
)
def test_a_side_that_fails_is_named(
    tmp_path: Path, manifest: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base, new = write_bundle(tmp_path / "a", step_ms=10), write_bundle(tmp_path / "b", **manifest)
    assert gate(tmp_path, base, new) == 2
    assert said in capsys.readouterr().err


def test_what_can_not_be_measured_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_bundle(tmp_path / "a", step_ms=10)
    assert gate(tmp_path, base, str(tmp_path / "none")) == 2
    assert f"new: found no bundle at {tmp_path / 'none'}" in capsys.readouterr().err
    assert gate(tmp_path, base, base, "--new-rev", "no-such-revision") == 2
    assert "git rev-parse failed" in capsys.readouterr().err
    assert gate(tmp_path, base, base, "--cores", "4096") == 2


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository here")
def test_a_revision_runs_its_own_sources(tmp_path: Path) -> None:
    base = write_bundle(tmp_path / "a", step_ms=10)
    assert gate(tmp_path, base, base, "--base-rev", "HEAD") == 0
    sides = json.loads((tmp_path / "out" / "latency_gate.json").read_text())["sides"]
    head = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "HEAD"], text=True).strip()
    assert (sides["base"]["commit"], sides["new"]["commit"]) == (head, "working tree")
    assert sides["base"]["package"] != sides["new"]["package"]


class Asked:
    """A side in this process that notes its turns."""

    def __init__(self, name: str, turns: list[str], step: float) -> None:
        self.name, self.turns, self.step = name, turns, step

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        if operation == "decode" and arguments["steps"] == 1:
            self.turns.append(self.name)
        return {"wall": [self.step] * arguments.get("steps", 1)}


def run(plan: Plan, new_step: float, seconds_a_round: float) -> tuple[Any, list[str], list[int]]:
    turns: list[str] = []
    opened: list[int] = []
    now = iter(range(10**6))

    @contextmanager
    def open_pair(number: int) -> Iterator[tuple[Asked, Asked]]:
        opened.append(number)
        yield Asked("base", turns, 1.0), Asked("new", turns, new_step)

    return measure(open_pair, Shape(), plan, clock=lambda: next(now) * seconds_a_round), turns, opened


def test_sides_take_turns_within_each_round() -> None:
    measured, turns, _ = run(Plan(0.02, 30.0, 1, num_looks=1), 1.0, 1.0)
    assert measured.verdict == "pass"
    fours = ["".join(turn[0] for turn in turns[at : at + 4]) for at in range(0, len(turns), 4)]
    assert set(fours) == {"bnnb", "nbbn"}
    firsts = [fours[at] for at in range(0, len(fours), Shape().turns)]
    assert abs(firsts.count("bnnb") - firsts.count("nbbn")) <= 1


def test_a_clear_case_ends_at_a_look() -> None:
    measured, _, _ = run(Plan(0.02, 100.0, 1), 1.1, 1.0)
    assert (measured.verdict, len(measured.looks)) == ("regression", 1)
    assert len(measured.pairs[0].steps) < 30
    assert measured.looks[0].error == pytest.approx(0.01)


def test_an_early_look_waits_for_a_second_pair() -> None:
    measured, _, opened = run(Plan(0.02, 100.0, 3), 1.1, 1.0)
    assert measured.verdict == "regression"
    assert opened == [0, 1]
    assert min(len(pair.steps) for pair in measured.pairs) >= MIN_ROUNDS


def test_there_are_never_more_looks_than_paid_for() -> None:
    measured, _, opened = run(Plan(0.02, 100.0, 3), 1.02, 0.5)
    assert measured.verdict == "pass"
    assert len(measured.looks) <= 5
    assert opened == [0, 1, 2]


class FakeLLM:
    """Streams whose steps are told to the side; the first takes the prompt."""

    def __init__(self, observe: Any) -> None:
        self._observe = observe

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode())

    def stream(self, prompt: str, params: Any) -> Iterator[str]:
        self._observe(SimpleNamespace(num_rows=1, num_tokens=len(prompt)))
        while True:
            yield "text"
            self._observe(SimpleNamespace(num_rows=1, num_tokens=1))
            self._observe(SimpleNamespace(num_rows=1, num_tokens=1))  # one of two shows no text by itself


def test_a_side_tells_each_steps_time_and_its_burden_is_within() -> None:
    burdens: list[float] = []
    side = Side(burden=burdens.append)
    side._rows, side._params = 1, SimpleNamespace
    side._llm = FakeLLM(side._observe)
    first = side.prompt(["hello there"], 10)
    assert (len(first["wall"]), len(first["cpu"])) == (1, 1)
    steps = side.decode(4)
    assert (len(steps["wall"]), len(steps["cpu"])) == (4, 4)
    assert min(steps["wall"]) > 0
    assert len(burdens) == 5

"""Verification: a sound bundle passes, a wrong token or a bent distribution is found and counted."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from ostinato.builder.checkpoint import Checkpoint
from ostinato.builder.hf_checkpoint import read_hf_folder
from ostinato.builder.recipe_arguments import recipe_for
from ostinato.builder.reference import chat_prompts, load_reference
from ostinato.builder.verdict_report import save_verdict, verdict_view
from ostinato.builder.verify import (
    Difference,
    Schedule,
    ScheduleResult,
    Verdict,
    kl_divergence,
    schedules_for,
    verify,
)
from ostinato.engines.bundle import Bundle
from ostinato.engines.errors import BuildError

from .conftest import BLOCK_SIZE, Pair, Silent
from .paged_runner import PagedRunner

PROMPTS = [[256, 72, 105], [256, 1, 2, 3, 4, 5, 6, 7, 8, 9], [256, 200]]


@dataclass
class GraphSubject:
    """The bundle's graph in ONNX Runtime, each prompt in chunks; `noise` bends its logits, `wrong` spoils one token."""

    bundle: Bundle
    noise: float = 0.0
    wrong: bool = False
    wrong_together: bool = False  # spoil it only where rows run together
    seen: list[Schedule] = field(default_factory=list)
    num_asked: list[int] = field(default_factory=list)

    def _runner(self) -> PagedRunner:
        path = self.bundle.rank_dir() / "model.onnx"
        return PagedRunner(path, self.bundle.manifest.sizes, block_size=BLOCK_SIZE)

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int, schedule: Schedule) -> list[list[int]]:
        self.seen.append(schedule)
        self.num_asked.append(len(prompts))
        runner, answers = self._runner(), []
        for request, prompt in enumerate(prompts):
            chunk = schedule.max_step_tokens
            for begin in range(0, len(prompt), chunk):
                found = runner.step([(request, list(prompt[begin : begin + chunk]))])
            answer = [int(found["tokens"][-1])]
            while len(answer) < num_tokens:
                answer.append(int(runner.step([(request, answer[-1:])])["tokens"][-1]))
            answers.append(answer)
        if self.wrong or (self.wrong_together and schedule.max_rows > 1):
            answers[1][5] = (answers[1][5] + 1) % 256
        return answers

    def logits(self, texts: Sequence[Sequence[int]]) -> Any:
        runner = self._runner()
        rows = np.concatenate([runner.step([(i, list(text))])["logits"] for i, text in enumerate(texts)])
        return rows + self.noise * np.random.default_rng(0).normal(size=rows.shape).astype(np.float32)


@pytest.fixture
def checkpoint(llama: Pair) -> Checkpoint:
    return read_hf_folder(llama[1].path.parent / "checkpoint")


def _verify(subject: GraphSubject, checkpoint: Checkpoint, schedules: Sequence[Schedule], exact: bool) -> Verdict:
    return verify(subject, load_reference(checkpoint), PROMPTS, schedules, exact, Silent().stage)


def test_a_sound_bundle_is_good(llama: Pair, checkpoint: Checkpoint) -> None:
    subject, heard = GraphSubject(llama[1]), Silent()
    schedules = schedules_for(max_rows=4, max_step_tokens=64)[2:4]
    verdict = verify(subject, load_reference(checkpoint), PROMPTS, schedules, True, heard.stage)
    assert verdict.is_good
    assert [result.num_identical for result in verdict.schedules] == [3, 3]
    assert [result.num_as_alone for result in verdict.schedules] == [3, 3]
    assert heard.stages == [*(schedule.name for schedule in schedules), "distributions"]
    assert verdict.num_positions == 3 * 32
    assert verdict.mean_kl < 1e-6
    assert verdict.top1 == 1.0


def test_a_wrong_token_is_found_where_it_is(llama: Pair, checkpoint: Checkpoint) -> None:
    subject = GraphSubject(llama[1], wrong=True)
    schedules = [Schedule("whole", 1, 64)]
    exact = _verify(subject, checkpoint, schedules, True)
    assert not exact.is_good
    assert exact.schedules[0].num_identical == 2
    (difference,) = exact.schedules[0].differences
    assert (difference.prompt, difference.token) == (1, 5)
    answer = subject.greedy(PROMPTS, 32, schedules[0])[1]
    with torch.inference_mode():
        logits = llama[0](torch.tensor([[*PROMPTS[1], *answer[:5]]])).logits[0, -1]
    assert difference.margin > 0
    assert difference.margin == pytest.approx(float(logits.max() - logits[answer[5]]), rel=1e-3)
    assert _verify(subject, checkpoint, schedules, False).is_good


def test_an_answer_that_depends_on_the_batch_is_counted(llama: Pair, checkpoint: Checkpoint) -> None:
    subject = GraphSubject(llama[1], wrong_together=True)
    schedules = [Schedule("alone", 1, 64), Schedule("together", 2, 64)]
    verdict = _verify(subject, checkpoint, schedules, True)
    assert not verdict.is_good
    assert [result.num_as_alone for result in verdict.schedules] == [3, 2]


@pytest.mark.parametrize("num_as_alone", [3, 4])
def test_where_company_must_not_count_an_answer_of_its_own_fails(llama: Pair, num_as_alone: int) -> None:
    results = tuple(
        ScheduleResult(Schedule(name, rows, 64), 4, (Difference(1, 5, 0.25),), count)
        for name, rows, count in (("alone", 1, 4), ("together", 8, 4), ("chunks", 8, num_as_alone))
    )
    verdict = Verdict(results, 0.0, 1.0, 128, must_be_identical=False, must_be_as_alone=True)
    assert verdict.is_good == (num_as_alone == 4)
    text = _told(llama[1], verdict)
    assert f"{num_as_alone} of 4" in next(line for line in text.splitlines() if "as alone, every schedule" in line)
    assert "in a batch of" not in text  # which is one of those schedules
    assert text.count("FAILED") == 3 * (num_as_alone == 3)  # the schedule, the check, the verdict
    assert next(line for line in text.splitlines() if "as transformers, every" in line).split()[-1] == "measured"


def _told(bundle: Bundle, verdict: Verdict) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(verdict_view(bundle.manifest, verdict))
    return console.export_text()


def test_the_prefix_cache_is_asked_twice(llama: Pair, checkpoint: Checkpoint) -> None:
    subject = GraphSubject(llama[1])
    schedules = [Schedule("alone", 1, 64), Schedule("again", 1, 64, prefix_cache=True)]
    assert _verify(subject, checkpoint, schedules, True).is_good
    assert subject.num_asked == [3, 6]


def test_a_bent_distribution_fails(llama: Pair, checkpoint: Checkpoint) -> None:
    verdict = _verify(GraphSubject(llama[1], noise=3.0), checkpoint, [Schedule("w", 1, 64)], False)
    assert not verdict.is_good
    assert verdict.mean_kl > 0.01


def _verdict(*, exact: bool, mean_kl: float, spoiled: bool) -> Verdict:
    differences = (Difference(1, 5, 0.25),) if spoiled else ()
    alone = ScheduleResult(Schedule("alone", 1, 64), 4, (), 4)
    together = ScheduleResult(Schedule("together", 8, 64), 4, differences, 4 - len(differences))
    return Verdict((alone, together), mean_kl=mean_kl, top1=1.0, num_positions=128, must_be_identical=exact)


@pytest.mark.parametrize(
    ("exact", "mean_kl", "spoiled", "num_failed"),
    [(True, 0.0, False, 0), (True, 0.0, True, 5), (False, 0.0, True, 0), (False, 0.02, False, 2)],
)
def test_the_table_says_what_failed(llama: Pair, exact: bool, mean_kl: float, spoiled: bool, num_failed: int) -> None:
    verdict = _verdict(exact=exact, mean_kl=mean_kl, spoiled=spoiled)
    text = _told(llama[1], verdict)
    assert text.count("FAILED") == num_failed
    assert verdict.is_good == (num_failed == 0)
    assert text.count("measured") == (0 if exact else 2)
    assert ("in a batch of 8" in text) == (not exact)
    assert ("prompt 1, token 5" in text and "0.25" in text) == spoiled


def test_the_tables_keep_to_80_columns(llama: Pair) -> None:
    """A row a schedule and a check: nothing is folded or cut."""
    results = tuple(ScheduleResult(schedule, 24, (Difference(1, 5, 0.25),), 23) for schedule in schedules_for(32, 512))
    text = _told(llama[1], Verdict(results, 0.02, 0.5, 768, must_be_identical=True))
    lines = text.splitlines()
    assert all(any(result.schedule.name in line and line.count("FAILED") == 2 for line in lines) for result in results)
    assert "…" not in text


def test_figures_of_several_bundles_share_a_file(llama: Pair, tmp_path: Path) -> None:
    file, manifest = tmp_path / "results" / "verify.json", llama[1].manifest
    save_verdict(file, manifest, _verdict(exact=True, mean_kl=0.0, spoiled=True), "ostinato verify a")
    other = replace(manifest, name="other")
    save_verdict(file, other, _verdict(exact=False, mean_kl=0.0, spoiled=False), "ostinato verify b")
    found = json.loads(file.read_text())
    assert set(found) == {manifest.name, "other"}
    first = found[manifest.name]
    assert (first["is_good"], first["alone_as_in_a_batch"]) == (False, 0.75)
    assert first["schedules"][1]["differences"] == [[1, 5, 0.25]]
    assert first["machine"]["cores"] >= 1
    assert found["other"]["command"] == "ostinato verify b"
    file.write_text("[1]")
    with pytest.raises(BuildError, match="not a file of verdicts"):
        save_verdict(file, manifest, _verdict(exact=True, mean_kl=0.0, spoiled=False), "")


def test_divergence_is_that_of_torch() -> None:
    rng = np.random.default_rng(1)
    wanted, given = (rng.normal(size=(4, 9)).astype(np.float32) * 30 for _ in range(2))
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (wanted, given))
    expected = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(kl_divergence(wanted, given), expected.numpy(), rtol=1e-9)
    np.testing.assert_allclose(kl_divergence(wanted, wanted), 0, atol=1e-12)


def test_schedules_stay_within_the_limits() -> None:
    for schedule in schedules_for(max_rows=4, max_step_tokens=16):
        assert 1 <= schedule.max_rows <= min(4, schedule.max_step_tokens)
        assert schedule.max_step_tokens <= 16
    pairs = [(s.max_rows, s.max_step_tokens) for s in schedules_for(32, 512)]
    assert pairs == [(1, 512), (1, 32), (1, 7), (8, 512), (8, 32), (8, 8), (7, 7), (8, 512)]
    assert [s.prefix_cache for s in schedules_for(32, 512)] == [False] * 7 + [True]


def test_prompts_are_chat_turns_that_fit(llama: Pair) -> None:
    folder = llama[1].tokenizer_dir
    prompts = chat_prompts(folder, ["Hi", "x" * 90], max_tokens=64)
    text = b"".join(bytes([i]) if i < 256 else {256: b"<S>", 257: b"<E>"}[i] for i in prompts[0])
    assert len(prompts) == 1
    assert text == b"<S>user\nHi<E>\n<S>assistant\n"


@pytest.mark.parametrize(
    ("name", "target"), [("smollm2-135m", "x86"), ("smollm2-135m", "cpu"), ("smollm2-135m-cpu", "cpu")]
)
def test_a_bundle_finds_the_recipe_of_its_name(llama: Pair, name: str, target: str) -> None:
    found = recipe_for(replace(llama[1].manifest, name=name, target=target), Path("b"))
    assert found.name == f"smollm2-135m-{target}.toml"
    assert found.is_file()

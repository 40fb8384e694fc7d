"""Verification: a sound bundle passes, a wrong token or a bent distribution is found and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.builder.checkpoint import Checkpoint
from ostinato.builder.hf_checkpoint import read_hf_folder
from ostinato.builder.reference import chat_prompts, load_reference
from ostinato.builder.verify import Schedule, kl_divergence, schedules_for, verify
from ostinato.engines.bundle import Bundle

from .conftest import BLOCK_SIZE, Pair
from .paged_runner import PagedRunner

PROMPTS = [[256, 72, 105], [256, 1, 2, 3, 4, 5, 6, 7, 8, 9], [256, 200]]


@dataclass
class GraphSubject:
    """The bundle's graph in ONNX Runtime, each prompt in chunks; `noise` bends its logits, `wrong` spoils one token."""

    bundle: Bundle
    noise: float = 0.0
    wrong: bool = False
    seen: list[Schedule] = field(default_factory=list)

    def _runner(self) -> PagedRunner:
        path = self.bundle.rank_dir() / "model.onnx"
        return PagedRunner(path, self.bundle.manifest.sizes, block_size=BLOCK_SIZE)

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int, schedule: Schedule) -> list[list[int]]:
        self.seen.append(schedule)
        runner, answers = self._runner(), []
        for request, prompt in enumerate(prompts):
            chunk = schedule.max_step_tokens
            for begin in range(0, len(prompt), chunk):
                found = runner.step([(request, list(prompt[begin : begin + chunk]))])
            answer = [int(found["tokens"][-1])]
            while len(answer) < num_tokens:
                answer.append(int(runner.step([(request, answer[-1:])])["tokens"][-1]))
            answers.append(answer)
        if self.wrong:
            answers[1][5] = (answers[1][5] + 1) % 256
        return answers

    def logits(self, texts: Sequence[Sequence[int]]) -> Any:
        runner = self._runner()
        rows = np.concatenate([runner.step([(i, list(text))])["logits"] for i, text in enumerate(texts)])
        return rows + self.noise * np.random.default_rng(0).normal(size=rows.shape).astype(np.float32)


@pytest.fixture
def checkpoint(llama: Pair) -> Checkpoint:
    return read_hf_folder(llama[1].path.parent / "checkpoint")


def test_a_sound_bundle_is_good(llama: Pair, checkpoint: Checkpoint) -> None:
    subject = GraphSubject(llama[1])
    schedules = schedules_for(max_rows=4, max_step_tokens=64)[2:4]
    verdict = verify(subject, load_reference(checkpoint), PROMPTS, schedules, must_be_identical=True)
    assert verdict.is_good
    assert [result.num_identical for result in verdict.schedules] == [3, 3]
    assert verdict.num_positions == 3 * 32
    assert verdict.mean_kl < 1e-6
    assert verdict.top1 == 1.0


def test_a_wrong_token_is_found_where_it_is(llama: Pair, checkpoint: Checkpoint) -> None:
    subject = GraphSubject(llama[1], wrong=True)
    schedules = [Schedule("whole", 1, 64)]
    exact = verify(subject, load_reference(checkpoint), PROMPTS, schedules, must_be_identical=True)
    assert not exact.is_good
    assert exact.schedules[0].num_identical == 2
    assert exact.schedules[0].first_difference == "prompt 1, token 5"
    loose = verify(subject, load_reference(checkpoint), PROMPTS, schedules, must_be_identical=False)
    assert loose.is_good


def test_a_bent_distribution_fails(llama: Pair, checkpoint: Checkpoint) -> None:
    subject = GraphSubject(llama[1], noise=3.0)
    verdict = verify(subject, load_reference(checkpoint), PROMPTS, [Schedule("w", 1, 64)], must_be_identical=False)
    assert not verdict.is_good
    assert verdict.mean_kl > 0.01


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
    assert {s.max_step_tokens for s in schedules_for(32, 512)} == {512, 32, 7}


def test_prompts_are_chat_turns_that_fit(llama: Pair) -> None:
    folder = llama[1].tokenizer_dir
    prompts = chat_prompts(folder, ["Hi", "x" * 90], max_tokens=64)
    text = b"".join(bytes([i]) if i < 256 else {256: b"<S>", 257: b"<E>"}[i] for i in prompts[0])
    assert len(prompts) == 1
    assert text == b"<S>user\nHi<E>\n<S>assistant\n"

"""Compares what a bundle says with what a float32 reference says of the same checkpoint (offline).

Greedy tokens are compared under several schedules, and whole next-token distributions along the bundle's own text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
NUM_TOKENS = 32  # greedy tokens a prompt
MAX_MEAN_KL = 0.01  # nats
MIN_TOP1 = 0.95


@dataclass(frozen=True)
class Schedule:
    """How requests are run: at most `max_rows` together, at most `max_step_tokens` tokens in a step."""

    name: str
    max_rows: int
    max_step_tokens: int
    prefix_cache: bool = False


class Subject(Protocol):
    """The bundle under test."""

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int, schedule: Schedule) -> list[list[int]]:
        """`num_tokens` greedy tokens for every prompt, end-of-sequence tokens not heeded."""
        ...

    def logits(self, texts: Sequence[Sequence[int]]) -> F32:
        """Logits after every token of every text, [sum of lengths, V]."""
        ...


Reference = Callable[[Sequence[int]], F32]  # a text → logits after each of its tokens, [length, V]


@dataclass(frozen=True)
class ScheduleResult:
    """How many prompts gave the reference's greedy tokens to the last one, and the first that did not."""

    schedule: Schedule
    num_prompts: int
    num_identical: int
    first_difference: str


@dataclass(frozen=True)
class Verdict:
    """Everything that was found, and whether it is enough."""

    schedules: tuple[ScheduleResult, ...]
    mean_kl: float  # nats, reference to bundle, over the positions that gave a token
    top1: float  # share of those positions with the same best token
    num_positions: int
    must_be_identical: bool

    @property
    def is_good(self) -> bool:
        identical = all(result.num_identical == result.num_prompts for result in self.schedules)
        close = self.mean_kl <= MAX_MEAN_KL and self.top1 >= MIN_TOP1
        return close and (identical or not self.must_be_identical)


def schedules_for(max_rows: int, max_step_tokens: int) -> tuple[Schedule, ...]:
    """Prompts whole and in chunks of 32 and 7, alone and 8 together, within the bundle's own limits."""
    together = min(8, max_rows)
    wanted = (
        ("whole prompts, alone", 1, max_step_tokens, False),
        ("whole prompts, 8 together", together, max_step_tokens, False),
        ("chunks of 32, 8 together", together, 32, False),
        ("chunks of 7, alone", 1, 7, False),
        ("chunks of 7, 7 together", together, 7, False),
        ("prefix cache, 8 together", together, max_step_tokens, True),
    )
    return tuple(
        Schedule(name, min(rows, tokens, max_step_tokens), min(tokens, max_step_tokens), cache)
        for name, rows, tokens, cache in wanted
    )


def verify(
    subject: Subject,
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    schedules: Sequence[Schedule],
    must_be_identical: bool,
) -> Verdict:
    """Run every schedule, then compare distributions along the first schedule's text."""
    judge = _Judge(reference)
    results: list[ScheduleResult] = []
    texts: list[list[int]] = []
    for schedule in schedules:
        answers = subject.greedy(prompts, NUM_TOKENS, schedule)
        results.append(_compare(judge, prompts, answers, schedule))
        texts = texts or [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    found = subject.logits(texts)
    kl, same, begin = [], [], 0
    for prompt, text in zip(prompts, texts, strict=True):
        wanted = reference(text)[len(prompt) - 1 :]
        given = found[begin : begin + len(text)][len(prompt) - 1 :].astype(np.float32)
        begin += len(text)
        kl.append(kl_divergence(wanted, given))
        same.append(wanted.argmax(-1) == given.argmax(-1))
    return Verdict(
        tuple(results),
        mean_kl=float(np.concatenate(kl).mean()),
        top1=float(np.concatenate(same).mean()),
        num_positions=sum(map(len, kl)),
        must_be_identical=must_be_identical,
    )


class _Judge:
    """Says where an answer leaves the reference's greedy path; answers seen before cost nothing."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._seen: dict[tuple[int, ...], int | None] = {}

    def first_difference(self, prompt: Sequence[int], answer: Sequence[int]) -> int | None:
        """The first token that is not the reference's best after the text before it, so also where it would part."""
        text = (*prompt, *answer)
        if text not in self._seen:
            best = self._reference(text[:-1])[len(prompt) - 1 :].argmax(-1)
            wrong = np.flatnonzero(best != np.asarray(answer))
            self._seen[text] = int(wrong[0]) if wrong.size else None
        return self._seen[text]


def _compare(
    judge: _Judge, prompts: Sequence[Sequence[int]], answers: list[list[int]], schedule: Schedule
) -> ScheduleResult:
    parted = [
        (index, place)
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        if (place := judge.first_difference(prompt, answer)) is not None
    ]
    first = f"prompt {parted[0][0]}, token {parted[0][1]}" if parted else ""
    return ScheduleResult(schedule, len(prompts), len(prompts) - len(parted), first)


def kl_divergence(wanted: F32, given: F32) -> NDArray[np.float64]:
    """KL(wanted ‖ given) of softmaxed logits [positions, V], in nats, a position."""
    p, q = _log_softmax(wanted), _log_softmax(given)
    divergence: NDArray[np.float64] = (np.exp(p) * (p - q)).sum(axis=-1)
    return divergence


def _log_softmax(logits: F32) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result

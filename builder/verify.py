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
class Difference:
    """Where an answer leaves the reference's greedy path. `margin`: by how much the reference prefers its own token."""

    prompt: int
    token: int
    margin: float  # in logits; near float32 rounding it is a tie


@dataclass(frozen=True)
class ScheduleResult:
    """What the prompts gave under one schedule."""

    schedule: Schedule
    num_prompts: int
    differences: tuple[Difference, ...]  # prompts that did not give the reference's greedy tokens to the last one
    num_as_alone: int  # prompts that gave the same tokens as under the first schedule, right or wrong

    @property
    def num_identical(self) -> int:
        return self.num_prompts - len(self.differences)


@dataclass(frozen=True)
class Verdict:
    """Everything that was found, and whether it is enough."""

    schedules: tuple[ScheduleResult, ...]
    mean_kl: float  # nats, reference to bundle, over the positions that gave a token
    top1: float  # share of those positions with the same best token
    num_positions: int
    must_be_identical: bool  # to the reference, under every schedule
    must_be_as_alone: bool = False  # under every schedule, right or wrong

    @property
    def is_as_alone(self) -> bool:
        return all(result.num_as_alone == result.num_prompts for result in self.schedules)

    @property
    def is_good(self) -> bool:
        identical = not any(result.differences for result in self.schedules)
        close = self.mean_kl <= MAX_MEAN_KL and self.top1 >= MIN_TOP1
        return close and (identical or not self.must_be_identical) and (self.is_as_alone or not self.must_be_as_alone)


def schedules_for(max_rows: int, max_step_tokens: int) -> tuple[Schedule, ...]:
    """Prompts whole and in chunks, alone (first) and together, within the bundle's own limits.

    A step has at least as many tokens as rows, so chunks of 7 come 7 together and chunks of 8 come 8 together.
    """
    whole = max_step_tokens
    wanted = ((1, whole), (1, 32), (1, 7), (8, whole), (8, 32), (8, 8), (7, 7))
    found: dict[tuple[int, int], Schedule] = {}
    for rows, tokens in wanted:
        tokens = min(tokens, whole)
        rows = min(rows, max_rows, tokens)
        prompts = "whole prompts" if tokens == whole else f"chunks of {tokens}"
        found.setdefault((rows, tokens), Schedule(f"{prompts}, {_together(rows)}", rows, tokens))
    rows = min(8, max_rows, whole)
    cached = Schedule(f"asked again (prefix cache), {_together(rows)}", rows, whole, prefix_cache=True)
    return (*found.values(), cached)


def _together(rows: int) -> str:
    return "alone" if rows == 1 else f"{rows} together"


def verify(
    subject: Subject,
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    schedules: Sequence[Schedule],
    must_be_identical: bool,
    announce: Callable[[str], None],
    must_be_as_alone: bool = False,
) -> Verdict:
    """Run every schedule, then compare distributions along the first schedule's text; `announce` hears what begins."""
    judge = _Judge(reference)
    results: list[ScheduleResult] = []
    alone: list[list[int]] = []
    for schedule in schedules:
        announce(schedule.name)
        asked = [*prompts, *prompts] if schedule.prefix_cache else prompts  # the second time, blocks are found
        answers = subject.greedy(asked, NUM_TOKENS, schedule)[-len(prompts) :]
        alone = alone or answers
        num_as_alone = sum(answer == first for answer, first in zip(answers, alone, strict=True))
        results.append(ScheduleResult(schedule, len(prompts), judge.differences(prompts, answers), num_as_alone))
    announce("distributions")
    kl, same = _compare_distributions(subject, reference, prompts, alone)
    return Verdict(
        tuple(results),
        mean_kl=float(kl.mean()),
        top1=float(same.mean()),
        num_positions=len(kl),
        must_be_identical=must_be_identical,
        must_be_as_alone=must_be_as_alone,
    )


class _Judge:
    """Says where answers leave the reference's greedy path; an answer seen before costs nothing."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._seen: dict[tuple[int, ...], tuple[int, float] | None] = {}

    def differences(self, prompts: Sequence[Sequence[int]], answers: Sequence[list[int]]) -> tuple[Difference, ...]:
        """One for each prompt that has any, in the prompts' order."""
        return tuple(
            Difference(index, *found)
            for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            if (found := self._first(prompt, answer)) is not None
        )

    def _first(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[int, float] | None:
        """The first token that is not the reference's best after the text before it, and the margin there."""
        text = (*prompt, *answer)
        if text not in self._seen:
            logits = self._reference(text[:-1])[len(prompt) - 1 :]
            wrong = np.flatnonzero(logits.argmax(-1) != np.asarray(answer))
            place = int(wrong[0]) if wrong.size else None
            self._seen[text] = (
                None if place is None else (place, float(logits[place].max() - logits[place, answer[place]]))
            )
        return self._seen[text]


def _compare_distributions(
    subject: Subject, reference: Reference, prompts: Sequence[Sequence[int]], answers: Sequence[list[int]]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Divergence and agreement on the best token at every position that gave a token of the answers."""
    texts = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    found = subject.logits(texts)
    kl, same, begin = [], [], 0
    for prompt, text in zip(prompts, texts, strict=True):
        wanted = reference(text)[len(prompt) - 1 :]
        given = found[begin : begin + len(text)][len(prompt) - 1 :]
        begin += len(text)
        kl.append(kl_divergence(wanted, given))
        same.append(wanted.argmax(-1) == given.argmax(-1))
    return np.concatenate(kl), np.concatenate(same)


def kl_divergence(wanted: F32, given: F32) -> NDArray[np.float64]:
    """KL(wanted ‖ given) of softmaxed logits [positions, V], in nats, a position."""
    p, q = _log_softmax(wanted), _log_softmax(given)
    divergence: NDArray[np.float64] = (np.exp(p) * (p - q)).sum(axis=-1)
    return divergence


def _log_softmax(logits: F32) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result

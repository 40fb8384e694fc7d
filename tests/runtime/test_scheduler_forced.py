"""Tokens that a guide forces: computed in the next step like the rest of a prompt, and the answer is the same."""

from __future__ import annotations

import numpy as np
import pytest

from ostinato.plugins.sampling_rows import I32
from ostinato.runtime.request import Request, SamplingParams, Status
from ostinato.runtime.timeline import Stage
from tests.fakes import Desk, PosLM, make_limits, make_request
from tests.scheduling import VOCAB, Turns, prompt_of, rows_of

PHRASES = {token: tuple((token * 7 + step) % VOCAB for step in range(token % 6)) for token in range(VOCAB)}


class Phrases:
    """After some tokens only one way to go on is allowed: told in advance (`forces`), or by masks of one token."""

    def __init__(self, *, forces: bool) -> None:
        self.accepted: list[int] = []
        self._forces = forces
        self._due: list[int] = []

    def fill_mask(self, words: I32) -> None:
        assert not (self._forces and self._due), "asked for what it had forced"
        words[:] = -1
        if self._due:
            words[:] = 0
            words.view(np.uint32)[self._due[0] // 32] = np.uint32(1 << self._due[0] % 32)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)
        if self._due:
            assert token_id == self._due.pop(0)
        else:
            self._due = list(PHRASES[token_id])

    def forced(self) -> tuple[int, ...]:
        return tuple(self._due) if self._forces else ()

    @property
    def has_ended(self) -> bool:
        return False


def _requests(num_blocks: int, params: SamplingParams, *, forces: bool) -> tuple[Desk, list[Request]]:
    limits = make_limits(block_size=4, max_rows=5, max_step_tokens=24, max_context=96, num_blocks=num_blocks)
    desk = Desk(limits, VOCAB)
    requests = [make_request(number, prompt_of(number, 5 + number), params, limits) for number in range(9)]
    for request in requests[::2]:
        request.guide = Phrases(forces=forces)
    return desk, requests


@pytest.mark.parametrize("num_blocks", [26, 200])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=60),
        SamplingParams(temperature=0.9, seed=3, max_tokens=60, stop_token_ids=(3, 9)),
        SamplingParams(temperature=0.9, frequency_penalty=1.0, repetition_penalty=1.3, max_tokens=60, logprobs=1),
    ],
    ids=["greedy", "stops", "penalties"],
)
def test_forced_tokens_are_those_that_masks_would_have_given(params: SamplingParams, num_blocks: int) -> None:
    outputs, steps = [], []
    for forces in (True, False):
        desk, requests = _requests(num_blocks, params, forces=forces)
        desk.submit(*requests)
        desk.run()
        desk.check_idle()
        assert isinstance(desk.executor, PosLM)
        outputs.append([request.tokens for request in requests])
        steps.append(desk.executor.num_steps)
        assert (desk.scheduler.num_preemptions > 0) == (num_blocks == 26)
        said = [
            [token for event in desk.events[request.id] for token in (event.token_id, *event.forced)]
            for request in requests
        ]
        assert said == [request.tokens[request.num_prompt :] for request in requests], "events tell every token"
        assert forces == any(event.forced for event in desk.events[0])
    assert outputs[0] == outputs[1]
    assert steps[0] < steps[1] or num_blocks == 26


def test_forced_tokens_are_computed_in_the_very_next_step() -> None:
    desk, requests = _requests(200, SamplingParams(temperature=0.0, max_tokens=60), forces=True)
    desk.submit(requests[0], requests[1])
    num_forced = 0
    while not desk.scheduler.is_idle:
        live = [request for request in requests[:2] if request.status is not Status.FINISHED]
        left = [(request.id, len(request.tokens) - request.num_computed, 1) for request in live]
        assert sorted(rows_of(desk.step())) == left
        num_forced += sum(num_tokens - 1 for _, num_tokens, _ in left if live[0].num_output > 1)
    assert num_forced > 3


def test_a_request_that_comes_back_decodes_once_it_has_caught_up() -> None:
    limits = make_limits(block_size=4, max_rows=2, max_step_tokens=8, max_context=96, num_blocks=60)
    desk = Desk(limits, VOCAB)
    request = make_request(0, prompt_of(0, 20), SamplingParams(temperature=0.0, max_tokens=12), limits)
    turns = Turns()
    request.timeline = turns  # type: ignore[assignment]
    desk.submit(request)
    while request.num_output < 5:
        desk.step()
    first = [Stage.QUEUE, Stage.PREFILL, Stage.DECODE]
    assert turns.stages == first
    desk.pages.prefix_caching = False  # else nearly all of it is found again
    desk.scheduler.preempt(request)
    for _ in range(3):
        desk.step()
        assert turns.stages == [*first, Stage.QUEUE, Stage.PREFILL]
    desk.step()
    assert request.num_output == 6
    assert turns.stages == [*first, *first]
    desk.run()
    assert turns.stages == [*first, *first]

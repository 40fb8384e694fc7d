"""What a step gives to masks: cheap ones come, dear ones take turns, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ostinato.plugins.sampling_rows import I32
from ostinato.runtime import masks as module
from ostinato.runtime.mask_time import STEP_SECONDS, UNKNOWN_SECONDS, MaskTime
from ostinato.runtime.masks import ALL, Masks
from ostinato.runtime.request import Request, SamplingParams
from tests.fakes import Desk, make_limits, make_request
from tests.guides import Endless
from tests.scheduling import VOCAB, prompt_of

CHEAP, DEAR = STEP_SECONDS / 128, 0.625 * STEP_SECONDS


class Clock:
    """A thread's time, which passes when somebody says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Slow(Endless):
    """A guide of anything, whose masks take so long."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.num_masks = 0
        self.seconds = seconds
        self._clock = clock

    def fill_mask(self, words: I32) -> None:
        self.num_masks += 1
        self._clock.seconds += self.seconds
        words[:] = 5

    def accept(self, token_id: int) -> None:
        pass


def _requests(clock: Clock, seconds: Sequence[float], num_output: int = 1) -> list[Request]:
    limits = make_limits(block_size=4, max_rows=256, max_step_tokens=512, max_context=64, num_blocks=4096)
    made = [make_request(n, [1, 2], SamplingParams(max_tokens=9), limits) for n in range(len(seconds))]
    for request, each in zip(made, seconds, strict=True):
        request.tokens += [3] * num_output
        request.guide = Slow(clock, each)
    return made


def _step(masks: Masks, requests: Sequence[Request]) -> list[bool]:
    """Whose mask was made, of those that do not rest."""
    made = masks.guided(requests, [request.num_output for request in requests])
    assert {int(words[0]) for words in made} <= {5, ALL}
    got = [bool(words[0] == 5) for words in made]
    assert got == [not request.num_put_off for request in requests]
    return got


def test_a_step_takes_its_allowance_and_two_masks_at_most_and_everybody_gets_turns() -> None:
    clock = Clock()
    requests, masks = _requests(clock, [DEAR] * 30 + [CHEAP] * 30), Masks(64, MaskTime(clock))
    for number in range(200):
        before = clock.seconds
        for request in requests:
            request.num_rests = max(0, request.num_rests - 1)
        got = _step(masks, [request for request in requests if not request.num_rests])
        assert any(got)
        assert clock.seconds - before <= STEP_SECONDS + 2 * DEAR + 1e-9
        if number > 40:  # their price is known
            assert all(request.num_put_off == 0 for request in requests[30:])
    num_masks = [request.guide.num_masks for request in requests if isinstance(request.guide, Slow)]
    assert min(num_masks[30:]) > 150
    assert min(num_masks[:30]) >= 6  # of the 200 that all of them share
    assert max(num_masks[:30]) <= 3 * min(num_masks[:30])


def test_who_waits_rests_as_long_as_those_before_him_take() -> None:
    clock = Clock()
    requests, masks = _requests(clock, [DEAR] * 20), Masks(64, MaskTime(clock))
    for request in requests:
        request.mask_seconds = DEAR
    _step(masks, requests)
    rests = sorted(request.num_rests for request in requests if request.num_put_off)
    assert rests[:9] == [0, 0, 1, 1, 2, 3, 3, 4, 5]
    assert len(rests) >= 17


def test_masks_of_the_first_token_are_never_put_off() -> None:
    clock = Clock()
    requests, masks = _requests(clock, [10.0] * 8, num_output=0), Masks(64, MaskTime(clock))
    assert all(_step(masks, requests))
    assert all(request.mask_seconds == 0 for request in requests)


def test_a_mask_of_unknown_price_is_not_taken_for_a_free_one() -> None:
    clock = Clock()
    requests, masks = _requests(clock, [DEAR] * 30 + [CHEAP]), Masks(64, MaskTime(clock))
    requests[-1].mask_seconds = CHEAP
    got = _step(masks, requests)
    assert got[-1]
    assert 1 <= sum(got[:-1]) <= 2
    assert CHEAP < UNKNOWN_SECONDS < STEP_SECONDS


def test_rows_that_nobody_waits_for_are_left_out_of_the_steps_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "MaskTime", lambda: MaskTime(clock))
    limits = make_limits(block_size=4, max_rows=16, max_step_tokens=64, max_context=96, num_blocks=400)
    desk = Desk(limits, VOCAB)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    requests = [make_request(number, prompt_of(number, 5), params, limits) for number in range(9)]
    for request in requests[1:]:
        request.guide = Slow(clock, DEAR)
    desk.submit(*requests)
    desk.step()
    num_steps = num_rows = 0
    while requests[0].num_output < 40:
        before = clock.seconds
        plan = desk.step()
        assert plan is not None
        num_rows += plan.num_rows
        num_steps += 1
        assert clock.seconds - before <= STEP_SECONDS + 2 * DEAR + 1e-9
    assert num_steps == 39  # a token a step, whatever the others want
    assert num_rows <= 7 * num_steps  # of 9
    desk.run()
    assert {request.num_output for request in requests} == {40}
    desk.check_idle()


def test_words_of_a_row_that_is_put_off_allow_something() -> None:
    """Its sample is thrown away, but the sampler needs one."""
    clock = Clock()
    requests, masks = _requests(clock, [10.0] * 3), Masks(64, MaskTime(clock))
    made = masks.guided(requests, [1] * 3)
    assert np.all(made.any(axis=1))

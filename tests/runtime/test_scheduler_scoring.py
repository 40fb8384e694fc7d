"""Prompt logprobs: the same whatever the chunks, the cache and the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ostinato.engines.sizes import Limits
from ostinato.runtime.pages import Pages
from ostinato.runtime.request import Event, SamplingParams
from tests.fakes import Desk, make_limits, make_request
from tests.scheduling import VOCAB, greedy, prompt_of


def _scoring(max_tokens: int, prompt_logprobs: int | None = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=1, prompt_logprobs=prompt_logprobs)


def _scores(prompt: Sequence[int], limits: Limits) -> list[float]:
    """Each prompt token's logprob as a generated one, after the tokens before it; -inf if it is not among the best."""
    scores = []
    for index in range(1, len(prompt)):
        desk = Desk(limits, VOCAB)
        desk.submit(make_request(0, prompt[:index], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20), limits))
        desk.run()
        logprob = desk.events[0][0].logprob
        assert logprob is not None
        scores.append(dict(logprob.top).get(prompt[index], -np.inf))
    return scores


@pytest.mark.parametrize("max_rows", [1, 3, 8])
def test_prompt_logprobs_are_those_of_generation(max_rows: int) -> None:
    limits = make_limits(max_rows=max_rows, max_step_tokens=8)
    prompt = prompt_of(4, 33)
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(0, prompt, _scoring(2, 20), limits))
    desk.run()
    first, second = desk.events[0]
    assert second.prompt_logprobs is None
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    scored = [logprob for logprob in first.prompt_logprobs[1:] if logprob is not None]
    assert [logprob.token_id for logprob in scored] == prompt[1:]
    expected = _scores(prompt, limits)
    num_ranked = 0
    for logprob, score in zip(scored, expected, strict=True):
        assert len(logprob.top) == 20
        if np.isfinite(score):
            num_ranked += 1
            assert logprob.logprob == pytest.approx(score, abs=1e-6)
        else:
            assert logprob.logprob <= logprob.top[-1][1]
    assert num_ranked >= 3


@pytest.mark.parametrize("order", [(0, 0), (0, 1), (1, 0), (2, 0, 0)])
def test_prompt_logprobs_do_not_depend_on_the_prefix_cache(order: Sequence[int]) -> None:
    limits = make_limits(max_step_tokens=8)
    prompt = prompt_of(4, 33)
    prompts = [prompt, prompt + prompt_of(5, 7), prompt]
    fresh = Desk(limits, VOCAB, pages=Pages(limits, prefix_caching=False))
    desk = Desk(limits, VOCAB)
    for number, which in enumerate(order):
        params = _scoring(1) if which < 2 else greedy(1)
        for each in (fresh, desk):
            each.submit(make_request(number, prompts[which], params, limits))
            each.run()
    assert desk.events == fresh.events
    assert all(event.num_cached == 0 for events in desk.events.values() for event in events)
    desk.submit(make_request(99, prompt, _scoring(1, None), limits))  # others may share what was scored
    desk.run()
    assert desk.events[99][0].num_cached == 32


def test_scoring_without_output_ends_with_length_and_no_token() -> None:
    limits = make_limits(max_rows=4)
    desk = Desk(limits, VOCAB)
    prompt = prompt_of(4, 21)
    desk.submit(make_request(0, prompt, _scoring(0), limits), make_request(1, prompt, _scoring(3), limits))
    desk.submit(make_request(2, prompt, _scoring(0, None), limits), make_request(3, [5], _scoring(0), limits))
    assert desk.finish(2) == "length"  # there is nothing to compute
    desk.run()
    assert [event._replace(prompt_logprobs=None) for event in desk.events[0]] == [Event(0, None, None, "length")]
    assert desk.events[0][0].prompt_logprobs == desk.events[1][0].prompt_logprobs
    assert desk.events[2] == [Event(2, None, None, "length")]
    assert desk.events[3] == [Event(3, None, None, "length", prompt_logprobs=(None,))]


def test_penalties_and_bias_leave_prompt_logprobs_alone() -> None:
    limits = make_limits()
    desk = Desk(limits, VOCAB)
    prompt = prompt_of(4, 21)
    odd = SamplingParams(
        repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((prompt[3], 50.0),), max_tokens=2, prompt_logprobs=3
    )
    desk.submit(make_request(0, prompt, _scoring(2, 3), limits), make_request(1, prompt, odd, limits))
    desk.run()
    assert desk.events[0][0].prompt_logprobs == desk.events[1][0].prompt_logprobs

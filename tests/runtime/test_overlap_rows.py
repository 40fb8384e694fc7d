"""What belongs to a row goes with it: whoever joins or leaves, a request's tokens are those it has alone."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.executor import Executor
from ostinato.runtime.request import Request, SamplingParams
from tests.fakes import PosLM, make_limits, make_request
from tests.overlap_fakes import HashGuide, LaggingLM, overlap_rules
from tests.overlap_requests import VOCAB, Band
from tests.scale import scaled

LIMITS = make_limits(max_rows=6, max_step_tokens=24, max_context=64, num_blocks=40)
MAX_OUTPUT = 8
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.9, seed=5),
    "bias": SamplingParams(temperature=0.0, logit_bias=((3, 6.0), (40, 6.0))),
    "other bias": SamplingParams(temperature=0.0, logit_bias=((11, 9.0),)),
    "penalties": SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0),
    "guided": SamplingParams(temperature=0.0),
    "guided and seeded": SamplingParams(temperature=0.9, seed=6),
    "at least": SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=tuple(range(0, VOCAB, 2))),
}


class Visit(NamedTuple):
    """A request's stay: when it joins, how many tokens it wants, and after how many steps it is aborted, if it is."""

    kind: str
    joins_at: int
    max_tokens: int
    leaves_after: int | None


VISITS = st.lists(
    st.builds(
        Visit,
        st.sampled_from(sorted(KINDS)),
        st.integers(0, 10),
        st.integers(1, MAX_OUTPUT),
        st.one_of(st.none(), st.integers(0, 6)),
    ),
    min_size=2,
    max_size=9,
)


def _request(number: int, kind: str, max_tokens: int) -> Request:
    request = make_request(number, [len(kind), 2, 3], KINDS[kind], LIMITS)
    request.max_tokens = max_tokens
    request.guide = HashGuide(VOCAB) if kind.startswith("guided") else None
    return request


@cache
def _alone(kind: str) -> list[int]:
    band = Band(LIMITS, PosLM(LIMITS, VOCAB))
    band.submit(_request(0, kind, MAX_OUTPUT))
    band.run()
    return band.token_ids(0)


def _play(visits: list[Visit], executor: Executor) -> Band:
    band = Band(LIMITS, executor)
    for step in range(40):
        for number, visit in enumerate(visits):
            if visit.joins_at == step:
                band.submit(_request(number, visit.kind, visit.max_tokens))
            if visit.leaves_after is not None and visit.joins_at + visit.leaves_after == step:
                band.loop.abort(number)
        band.step()
    band.run()
    return band


@pytest.mark.parametrize("is_lagging", [True, False])
@settings(max_examples=scaled(60, 5000), deadline=None, derandomize=True)
@given(visits=VISITS)
def test_a_row_keeps_what_is_its_own(is_lagging: bool, visits: list[Visit]) -> None:
    executor = LaggingLM(LIMITS, VOCAB, overlap_rules(LIMITS)) if is_lagging else PosLM(LIMITS, VOCAB)
    band = _play(visits, executor)
    for number, visit in enumerate(visits):
        expected = _alone(visit.kind)[: visit.max_tokens]
        told = band.token_ids(number)
        if visit.leaves_after is None:
            assert told == expected
        else:
            assert told == expected[: len(told)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_lagging", [True, False])
def test_the_first_token_is_sampled_by_the_rows_own_rules(kind: str, is_lagging: bool) -> None:
    """A plain row ran and ended before; its place goes to one that is masked, biased or guided."""
    executor = LaggingLM(LIMITS, VOCAB, overlap_rules(LIMITS)) if is_lagging else PosLM(LIMITS, VOCAB)
    band = Band(LIMITS, executor)
    band.submit(_request(0, "greedy", 2))
    band.run()
    for number, other in enumerate(KINDS, start=1):
        band.submit(_request(number, other, 2))
        band.step()
    band.submit(_request(50, kind, 3))
    band.run()
    assert band.token_ids(50) == _alone(kind)[:3]

"""What only a body of /v1/completions has: prompts, echo, best_of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.wire_completions import CompletionBody
from ostinato.runtime.wire_parse import parse_body

LIMITS = ServeLimits()


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"model": "toy", "prompt": "x"} | fields).encode())


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check(**fields)
    return caught.value


def check(**fields: Any) -> None:
    body = completion(**fields)
    body.params(LIMITS)
    body.prompts(LIMITS)


def test_completion_caps_logprobs_and_what_is_not_served() -> None:
    assert completion(max_tokens=0, echo=True, logprobs=1).params(LIMITS).max_tokens == 0
    assert completion(echo=True, logprobs=5).params(LIMITS).prompt_logprobs == 5
    assert completion(logprobs=5).params(LIMITS).prompt_logprobs is None
    for field, value in (("logprobs", 6), ("logprobs", -1), ("logprobs", True), ("suffix", "x"), ("suffix", "")):
        assert refused(**{field: value}).param == field


def test_best_of_makes_more_choices_than_it_answers() -> None:
    assert completion(best_of=1).params(LIMITS) == completion().params(LIMITS)
    assert completion(best_of=5, n=2).params(LIMITS) == completion(n=5, logprobs=0).params(LIMITS)
    assert completion(best_of=5, n=2, logprobs=3).params(LIMITS) == completion(n=5, logprobs=3).params(LIMITS)
    assert completion(best_of=2, n=2, stream=True).params(LIMITS) == completion(n=2).params(LIMITS)
    for fields in (
        {"best_of": 0}, {"best_of": 2, "n": 3}, {"best_of": 129}, {"best_of": 10**9}, {"best_of": -1},
        {"best_of": True}, {"best_of": 2, "stream": True},
    ):  # fmt: skip
        assert refused(**fields).param == "best_of"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)  # fmt: skip
def test_prompt_forms(prompt: object, expected: list[object]) -> None:
    assert completion(prompt=prompt).prompts(LIMITS) == expected


@pytest.mark.parametrize(
    "prompt",
    [
        None, 5, 1.5, True, {}, [], [[]], [1, "a"], ["a", 1], ["a", [1]], [[1], "a"], [True], [1.0], [[1], [True]],
        [None], [["a"]], [[[1]]], ["a"] * 65,
    ],
)  # fmt: skip
def test_prompts_that_are_refused(prompt: object) -> None:
    assert refused(prompt=prompt).param == "prompt"

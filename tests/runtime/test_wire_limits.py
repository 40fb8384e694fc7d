"""A server's own bounds, lower and higher than the usual ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.bridge import Prompt
from ostinato.runtime.request import SamplingParams
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.wire_completions import CompletionBody
from ostinato.runtime.wire_limits import check_limits, check_total
from ostinato.runtime.wire_parse import parse_body

LIMITS = ServeLimits()


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"model": "toy", "prompt": "x"} | fields).encode())


def test_bounds_of_the_server_are_kept() -> None:
    few = ServeLimits(max_choices=4, max_stops=1, max_stop_chars=3, max_logit_bias=1, max_prompts=2, max_logprobs=1)
    for fields, param in (
        ({"n": 5}, "n"), ({"n": 3, "prompt": ["a", "b"]}, "n"), ({"best_of": 5}, "best_of"),
        ({"stop": ["a", "b"]}, "stop"), ({"stop": "abcd"}, "stop"), ({"logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
        ({"prompt": ["a"] * 3}, "prompt"), ({"logprobs": 2}, "logprobs"),
    ):  # fmt: skip
        body = completion(**fields)
        with pytest.raises(RequestError) as caught:
            check_limits(body.params(few), len(body.prompts(few)), few)
        assert caught.value.param == param
    body = completion(n=4, stop="abc", logit_bias={"1": 1}, logprobs=1)
    check_limits(body.params(few), len(body.prompts(few)), few)
    wide = ServeLimits(max_logprobs=20)
    assert completion(logprobs=20).params(wide).logprobs == 20


@pytest.mark.parametrize(
    ("n", "max_tokens", "fits"), [(2, 50, True), (2, 51, False), (1, None, True), (2, None, False)]
)
def test_all_choices_together_have_a_bound(n: int, max_tokens: int | None, fits: bool) -> None:
    prompt = Prompt([1] * 28, SamplingParams(n=n, max_tokens=max_tokens))
    check_total([prompt], 128, LIMITS)
    if fits:
        check_total([prompt], 128, ServeLimits(max_total_tokens=100))
    else:
        with pytest.raises(RequestError, match="at most 100 are allowed") as caught:
            check_total([prompt], 128, ServeLimits(max_total_tokens=100))
        assert caught.value.param == "max_tokens"

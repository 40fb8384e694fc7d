"""Sampling parameters refuse what no step could use, by field, before a request exists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.request import MAX_STOP_IDS, SamplingParams, check_token_ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"), ("temperature", None), ("temperature", True), ("temperature", float("nan")),
        ("top_p", [1]), ("top_k", 1.5), ("top_k", "x"), ("top_k", None), ("n", 1.0), ("n", True), ("min_tokens", 1.5),
        ("seed", 1.5), ("seed", "x"), ("max_tokens", 1.5), ("logprobs", 1.0), ("logprobs", True),
        ("prompt_logprobs", "1"), ("ignore_eos", "no"), ("ignore_eos", 0), ("skip_special_tokens", None),
        ("stop", "abc"), ("stop", 5), ("stop", None), ("stop", (5,)), ("stop_token_ids", 5), ("stop_token_ids", "5"),
        ("stop_token_ids", tuple(range(MAX_STOP_IDS + 1))), ("logit_bias", {5: 1.0}), ("logit_bias", (5,)),
        ("logit_bias", ((5, "1"),)), ("logit_bias", ((5, 1.0, 2.0),)), ("logit_bias", ((5, float("inf")),)),
    ],
)  # fmt: skip
def test_values_of_no_use_name_their_field(field: str, value: object) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(RequestError) as refused:
        SamplingParams(**fields)
    assert refused.value.param == field


@pytest.mark.parametrize("token_id", ["5", None, 1.0, [5]])
def test_ids_that_are_no_integers_are_refused(token_id: Any) -> None:
    with pytest.raises(RequestError) as refused:
        check_token_ids("prompt", [3, token_id], 10)
    assert refused.value.param == "prompt"


def test_numpys_integers_are_ids_too() -> None:
    check_token_ids("prompt", list(np.arange(10)), 10)

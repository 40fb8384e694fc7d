"""FeedTokens: its oracle by hand, its kernel in the interpreter against it, and its launch rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ostinato.engines.program import StepShape
from ostinato.plugins.feed_tokens import FORMALS, feed_tokens
from ostinato.plugins.feed_tokens_launch import feed_tokens_launches
from tests.interpreter import compiled_form, run_launches

POISON = -(2**31) + 7


def int32(*numbers: int) -> NDArray[Any]:
    return np.array(numbers, np.int32)


def test_by_hand() -> None:
    inputs = {
        "input_ids": int32(0, 17, 0, 0, POISON),
        "feed_rows": int32(2, -1, 0, 1, -1),
        "last_tokens": int32(40, -1, 49151),
    }
    before = {name: array.copy() for name, array in inputs.items()}
    assert feed_tokens(inputs).tolist() == [49151, 17, 40, 0, POISON]  # a row without a legal token gives 0
    assert all((inputs[name] == before[name]).all() for name in FORMALS)


@pytest.mark.parametrize(
    "step", [StepShape("decode", 1, 1), StepShape("decode", 7, 7), StepShape("prefill", 96, 8)], ids=lambda one: one.key
)
def test_kernel_equals_oracle_and_touches_nothing_else(step: StepShape) -> None:
    """Live tokens, fed or not, then pads whose ids are poison; the tokens of the step before end in poison too."""
    rng = np.random.default_rng(step.tokens)
    for _ in range(8):
        last = 1 + int(rng.integers(8))
        live = 1 + int(rng.integers(step.tokens))
        rows = np.where(rng.random(live) < 0.6, rng.integers(0, last, live), -1)
        inputs = {
            "input_ids": np.full(step.tokens, POISON, np.int32),
            "feed_rows": np.full(step.tokens, -1, np.int32),
            "last_tokens": np.full(last + 3, POISON, np.int32),
        }
        inputs["input_ids"][:live] = rng.integers(0, 2**31 - 1, live)
        inputs["feed_rows"][:live] = rows
        inputs["last_tokens"][:last] = rng.integers(-1, 2**31 - 1, last)
        inputs["last_tokens"][0] = -1
        wanted = {**inputs, "input_ids": feed_tokens(inputs)}
        found = {name: array.copy() for name, array in inputs.items()}
        run_launches(feed_tokens_launches(step), found)
        for name in FORMALS:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_one_kernel_serves_every_step() -> None:
    steps = [StepShape("decode", 1, 1), StepShape("decode", 64, 64), StepShape("prefill", 2048, 64)]
    launches = [feed_tokens_launches(step) for step in steps]
    assert len({launch.kernel for (launch,) in launches}) == 1
    assert [launch.grid for (launch,) in launches] == [(step.tokens, 1, 1) for step in steps]
    kernel = launches[0][0].kernel
    assert compiled_form(kernel).arg_names == list(FORMALS)

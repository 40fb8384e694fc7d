"""The gate's statistics on made-up rounds: how often they cry wolf, and how often they sleep."""

from __future__ import annotations

from collections.abc import Callable

import gate_statistics
import numpy as np
import pytest
from gate_statistics import ERROR, Interval, error_per_look, interval, round_ratio, verdict

from tests.scale import scaled

STEPS, ROUNDS, LOOKS, BUDGET = 16, 60, 5, 0.025
Noise = Callable[[np.random.Generator], np.ndarray]  # [ROUNDS, STEPS, 2]: factors on the step times, base's and new's


def steady(source: np.random.Generator) -> np.ndarray:
    return np.exp(source.normal(0, 0.05, (ROUNDS, STEPS, 2)))


def drifting(source: np.random.Generator) -> np.ndarray:
    """The machine's speed wanders by a fifth, for both sides alike."""
    walk = np.cumsum(source.normal(0, 0.2 / np.sqrt(ROUNDS * STEPS), ROUNDS * STEPS))
    return steady(source) * np.exp(walk).reshape(ROUNDS, STEPS, 1)


def spiky(source: np.random.Generator) -> np.ndarray:
    """One step in ten takes up to four times as long, and in some rounds all of one side's do."""
    spikes = np.where(source.random((ROUNDS, STEPS, 2)) < 0.1, source.uniform(1, 4, (ROUNDS, STEPS, 2)), 1.0)
    bad = np.where(source.random((ROUNDS, 1, 2)) < 0.08, 1.5, 1.0)
    return steady(source) * spikes * bad


def lasting(source: np.random.Generator) -> np.ndarray:
    """What slows one side lasts into its next rounds."""
    noise = source.normal(0, 0.02, (ROUNDS, 1, 2))
    for one in range(1, ROUNDS):
        noise[one] += 0.3 * noise[one - 1]
    return steady(source) * np.exp(noise)


def share_of_regressions(noise: Noise, ratio: float, budget: float, count: int) -> float:
    """Of `count` gates with five looks, how many call a change by `ratio` a regression."""
    source, found = np.random.default_rng(11), 0
    for _ in range(count):
        times = noise(source) * [1.0, ratio]
        ratios = [round_ratio(one[:, 0], one[:, 1]) for one in times]
        found += _gate(ratios, budget) == "regression"
    return found / count


def _gate(ratios: list[float], budget: float) -> str:
    for look in range(1, LOOKS + 1):
        seen = ratios[: max(20, ROUNDS * look // LOOKS)]
        result = verdict(interval([seen], error_per_look(LOOKS)), budget, is_last=look == LOOKS)
        if result != "open":
            break
    return result


@pytest.mark.parametrize("noise", [steady, drifting, spiky, lasting])
def test_like_against_like_passes_and_five_per_cent_do_not(noise: Noise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_statistics, "RESAMPLES", 1000)
    count = scaled(40, 400)
    spread = 3 * np.sqrt(0.05 * 0.95 / count)  # the share's own
    assert share_of_regressions(noise, 1.0, BUDGET, count) <= 0.05
    assert share_of_regressions(noise, 1.05, BUDGET, count) >= 0.95 - spread


@pytest.mark.parametrize("noise", [steady, drifting, spiky, lasting])
def test_a_change_of_just_the_budget_is_called_a_regression_as_seldom_as_promised(
    noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_statistics, "RESAMPLES", 1000)
    count = scaled(60, 1000)
    allowed = ERROR + 3 * np.sqrt(ERROR * (1 - ERROR) / count)  # the share's own spread
    assert share_of_regressions(noise, 1 + BUDGET, BUDGET, count) <= allowed


def test_pairs_that_differ_widen_the_interval() -> None:
    source = np.random.default_rng(3)
    level = [np.exp(source.normal(0, 0.01, 30)).tolist() for _ in range(6)]
    apart = [[ratio * np.exp(shift) for ratio in pair] for pair, shift in zip(level, (-3, 2, 0, 3, -2, 0), strict=True)]
    apart = [[ratio**0.01 for ratio in pair] for pair in apart]  # shifts of 3% at most
    alike, unlike = interval(level), interval(apart)
    assert unlike.high - unlike.low > 2 * (alike.high - alike.low)


def test_the_same_rounds_and_seed_give_the_same_interval() -> None:
    ratios = np.exp(np.random.default_rng(5).normal(0.01, 0.02, 25)).tolist()
    assert interval([ratios], seed=1) == interval([ratios], seed=1)
    assert interval([ratios]).estimate == pytest.approx(np.exp(0.01), abs=0.01)


def test_a_fifth_of_wild_rounds_does_not_move_the_estimate() -> None:
    assert interval([[1.01] * 16 + [9.0] * 4]).estimate == pytest.approx(1.01)


def test_verdicts() -> None:
    assert verdict(Interval(1.04, 1.03, 1.05, 0.05), 0.02, is_last=False) == "regression"
    assert verdict(Interval(1.02, 1.01, 1.03, 0.05), 0.02, is_last=False) == "open"
    assert verdict(Interval(1.02, 1.01, 1.03, 0.05), 0.02, is_last=True) == "pass"
    assert verdict(Interval(1.0, 0.99, 1.01, 0.05), 0.02, is_last=False) == "pass"

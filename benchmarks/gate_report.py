"""What the latency gate shows and keeps: a table, the record, a picture of the ratios (once per run)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from figures_table import FiguresTable
from gate_measure import Measured, Plan, Shape
from gate_statistics import Interval, interval
from machine import save_result


def ttft_interval(measured: Measured, plan: Plan) -> Interval:
    """Told, not judged: a prompt gives one value where it gives dozens of steps."""
    return interval([pair.ttft_ratios for pair in measured.pairs], seed=plan.seed)


def print_table(measured: Measured, plan: Plan, names: tuple[str, str]) -> None:
    """Both sides' medians and the ratio with its bounds."""
    columns = ("", "base ms", "new ms", "new / base", "lower", "upper")
    table = FiguresTable(f"base: {names[0]}\nnew:  {names[1]}", *columns, num_texts=1)
    lines = (
        ("decode step", measured.medians(), measured.looks[-1]),
        ("first token", measured.ttft_medians(), ttft_interval(measured, plan)),
    )
    for name, medians, found in lines:
        ratios = (found.estimate, found.low, found.high)
        table.add(name, *(f"{s * 1e3:.2f}" for s in medians), *(f"{ratio:.4f}" for ratio in ratios))
    table.show()
    num_rounds = sum(len(pair.steps) for pair in measured.pairs)
    print(
        f"{measured.verdict}: the lower bound is {measured.looks[-1].low - 1:+.1%}, the budget {plan.budget:+.1%} "
        f"({num_rounds} rounds, {len(measured.pairs)} of {plan.pairs} pairs, bounds at {measured.looks[-1].error:.1%})"
    )


def save(measured: Measured, plan: Plan, shape: Shape, sides: tuple[dict[str, Any], ...], folder: Path) -> Path:
    """`latency_gate.json`, and the picture beside it."""
    result = {
        "verdict": measured.verdict,
        "plan": vars(plan),
        "shape": vars(shape),
        "load_average": os.getloadavg(),
        "sides": dict(zip(("base", "new"), sides, strict=True)),
        "looks": [vars(look) for look in measured.looks],
        "ttft": vars(ttft_interval(measured, plan)),
        "median_ms": [round(s * 1e3, 4) for s in measured.medians()],
        "ttft_median_ms": [round(s * 1e3, 4) for s in measured.ttft_medians()],
        "ratios": [[round(ratio, 5) for ratio in pair.ratios] for pair in measured.pairs],
        "ttft_ratios": [[round(ratio, 5) for ratio in pair.ttft_ratios] for pair in measured.pairs],
    }
    path = save_result("latency_gate", result, folder)
    plot(measured, plan, path.with_suffix(".png"))
    return path


def plot(measured: Measured, plan: Plan, path: Path) -> None:
    """A dot a round, a colour a pair; the estimate's band and the budget across."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    start = 0
    for number, pair in enumerate(measured.pairs):
        axes.plot(range(start, start + len(pair.steps)), pair.ratios, ".", label=f"pair {number + 1}")
        start += len(pair.steps)
    last = measured.looks[-1]
    axes.axhspan(last.low, last.high, color="#2b7bba", alpha=0.2, label="interval")
    axes.axhline(last.estimate, color="#2b7bba")
    axes.axhline(1 + plan.budget, color="#d9822b", linestyle="--", label="budget")
    axes.set_xlabel("round")
    axes.set_ylabel("step time, new / base")
    axes.set_title(f"latency gate: {measured.verdict}")
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=110)

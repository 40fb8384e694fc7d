"""Host time of a replayed decode step by rows: plan, pack, launch, wait, commit, on a device that takes none (one run).

python benchmarks/replay_overhead.py --rows 1,2,4,8,16,32,64 --steps 400

The loop, scheduler, packer and executor are the real ones; the device is the tests' simulated one, with empty engines
and kernels. What its calls take is shown apart ("device"), in no other figure. "rest" is what the loop does
between the parts, "p2" the host at the fastest fiftieth of steps: what it takes while nobody else uses the machine.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from figures_table import FiguresTable
from machine import OUT, save_result
from rich.progress import track

sys.path.append(str(Path(__file__).resolve().parent.parent))  # the simulated device is the tests'

from null_device import TimedDriver, build_null_bundle, null_desk, null_limits

from ostinato.runtime.flight import StepTimes
from ostinato.runtime.request import SamplingParams
from tests.sim_desk import SimDesk

PARTS = ("plan", "pack", "launch", "wait", "commit")
PROMPT_TOKENS = 16
WARM_STEPS = 8
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1}


@dataclass(frozen=True)
class StepTrace:
    """One step's parts, and from the end of the last one to its own, seconds on the host and in the device's calls."""

    times: StepTimes
    host: float
    device: float


class Recorder:
    """The loop's observer."""

    def __init__(self, driver: TimedDriver) -> None:
        self.steps: list[StepTrace] = []
        self._driver = driver
        self._last = (driver.host_clock(), driver.seconds)

    def __call__(self, times: StepTimes) -> None:
        host, device = self._driver.host_clock(), self._driver.seconds
        self.steps.append(StepTrace(times, host - self._last[0], device - self._last[1]))
        self._last = (self._driver.host_clock(), device)


def measure(desk: SimDesk, driver: TimedDriver, rows: int, steps: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """Medians over the steps in which `rows` rows decode, in microseconds."""
    recorder = Recorder(driver)
    desk.loop.observe_step = recorder
    params = SamplingParams(max_tokens=steps + 2 * WARM_STEPS, ignore_eos=True, **sampling)
    requests = desk.requests([[1 + row % 200] * PROMPT_TOKENS for row in range(rows)], params)
    desk.run(requests)
    decode = [step for step in recorder.steps if step.times.num_rows == step.times.num_tokens == rows]
    kept = decode[WARM_STEPS : WARM_STEPS + steps]
    if len(kept) < steps // 2:
        raise RuntimeError(f"found {len(kept)} steps of {rows} rows, wanted {steps}")
    parts = {part: np.array([getattr(step.times, part) for step in kept]) * 1e6 for part in PARTS}
    host = np.array([step.host for step in kept]) * 1e6
    series = parts | {"rest": host - sum(parts.values()), "host": host}
    series["device"] = np.array([step.device for step in kept]) * 1e6
    medians = {name: round(float(np.median(values)), 1) for name, values in series.items()}
    return {"rows": rows, "steps": len(kept), **medians, "p2": round(float(np.quantile(host, 0.02)), 1)}


def row_cost(results: list[dict[str, Any]], name: str = "host") -> tuple[float, float]:
    """Least squares over the buckets: microseconds of a step, and of each row in it."""
    if len(results) < 2:
        return results[0][name], 0.0
    slope, base = np.polyfit([one["rows"] for one in results], [one[name] for one in results], 1)
    return round(float(base), 1), round(float(slope), 3)


def print_table(results: list[dict[str, Any]], title: str) -> None:
    names = (*PARTS, "rest", "host", "p2", "device")
    table = FiguresTable(title, "rows", *names)
    for one in results:
        table.add(str(one["rows"]), *(f"{one[name]:.0f}" for name in names))
    table.show()


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Parts stacked by rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    rows = [str(one["rows"]) for one in results]
    below = np.zeros(len(results))
    for part in (*PARTS, "rest"):
        values = np.array([one[part] for one in results])
        axes.bar(rows, values, bottom=below, label=part)
        below += values
    axes.plot(rows, [one["host"] for one in results], "k.-", label="host, median")
    axes.plot(rows, [one["p2"] for one in results], "k.:", label="host, fastest fiftieth")
    axes.set_xlabel("rows")
    axes.set_ylabel("µs a decode step")
    axes.legend()
    figure.savefig(path, dpi=110)


def profile(desk: SimDesk, driver: TimedDriver, rows: int, steps: int, sampling: dict[str, Any]) -> None:
    """Where the host's time goes, by function."""
    profiler = cProfile.Profile()
    profiler.runcall(measure, desk, driver, rows, steps, sampling)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--sampled", action="store_true", help="temperature, truncation and penalties (default: greedy)"
    )
    parser.add_argument("--bundle", type=Path, help="a bundle that `null_device` built before (default: build one)")
    parser.add_argument("--profile", action="store_true", help="show where the largest bucket's time goes, by function")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of replay_overhead.json and .png")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_args(arguments)
    rows = [int(count) for count in args.rows.split(",")]
    limits = null_limits(max(rows), 16 * -(-(PROMPT_TOKENS + args.steps + 3 * WARM_STEPS) // 16))
    sampling = SAMPLED if args.sampled else GREEDY
    with tempfile.TemporaryDirectory() as folder:
        bundle = args.bundle or build_null_bundle(Path(folder), limits)
        with null_desk(bundle) as (desk, driver):
            if args.profile:
                profile(desk, driver, max(rows), args.steps, sampling)
                return 0
            results = [measure(desk, driver, count, args.steps, sampling) for count in track(rows, transient=True)]
    base, slope = row_cost(results)
    print_table(results, f"µs a replayed decode step, {'sampled' if args.sampled else 'greedy'} (medians)")
    print(f"host: {base:.0f} µs a step and {slope:.2f} µs a row; the device's calls are not in it")
    fast = row_cost(results, "p2")
    print(f"its fastest fiftieth: {fast[0]:.0f} µs a step and {fast[1]:.2f} µs a row")
    record = {
        "sampling": sampling, "microseconds": results, "step_us": base, "row_us": slope, "p2_step_us": fast[0],
        "p2_row_us": fast[1], "load_average": os.getloadavg(),
    }  # fmt: skip
    path = save_result("replay_overhead", record, args.out)
    plot(results, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

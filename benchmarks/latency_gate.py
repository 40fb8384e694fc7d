"""Latency regression gate: two bundles, or two revisions, decode the same prompts in turns (one run a call).

python benchmarks/latency_gate.py --base engines/store/OLD --new engines/store/NEW
python benchmarks/latency_gate.py --base engines/store/smollm2-135m --base-rev main --new-rev HEAD --budget 0.02

Exit 1: even the lower bound of the ratio of step times is beyond the budget. 0: it is not. 2: it could not be measured.
On a machine that others use, `--clock cpu --cores 1` counts the work of a step and not the waiting.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from gate_measure import Askable, Measured, Plan, Shape, measure
from gate_report import print_table, save
from gate_side import CHILD, GateError, SideProcess, Source
from machine import OUT
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Pairs:
    """Opens fresh processes of both sides, a pair after the other. `sides`: who answered last, base's and new's."""

    def __init__(self, sources: tuple[Source, Source], folder: Path, cores: list[int], rows: int) -> None:
        self.sides: tuple[dict[str, Any], ...] = ()
        self._sources, self._folder, self._cores, self._rows = sources, folder, cores, rows

    @contextmanager
    def open(self, number: int) -> Iterator[tuple[Askable, Askable]]:
        """Both load at once, so that neither finds the machine as the other left it."""
        with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
            processes = [
                stack.enter_context(closing(SideProcess(source, self._folder / f"{source.name}{number}")))
                for source in self._sources
            ]
            waiting = [
                threads.submit(process.open, source.bundle, self._cores, self._rows)
                for process, source in zip(processes, self._sources, strict=True)
            ]
            self.sides = tuple(one.result() for one in waiting)
            base, new = processes
            yield base, new


def run_gate(sources: tuple[Source, Source], shape: Shape, plan: Plan, cores: list[int], out: Path) -> Measured:
    """Measure, print, save. Raises GateError."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    shown = Progress(*columns, console=console, disable=not console.is_terminal)
    with tempfile.TemporaryDirectory() as folder, shown as bar:
        pairs = Pairs(sources, Path(folder), cores, shape.rows)
        task = bar.add_task("pair 1", total=plan.pairs)

        def show(measured: Measured) -> None:
            count = len(measured.pairs)
            bar.update(task, description=f"pair {count}, round {len(measured.pairs[-1].steps)}", completed=count - 1)

        measured = measure(pairs.open, shape, plan, show)
    print_table(measured, plan, (_label(pairs.sides[0]), _label(pairs.sides[1])))
    path = save(measured, plan, shape, pairs.sides, out)
    print(f"wrote {path} and {path.with_suffix('.png').name}")
    return measured


def _label(side: dict[str, Any]) -> str:
    return f"{side['bundle']} ({str(side['identity'])[:16]}), {side['commit'][:12]}"


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="bundle of the base side")
    parser.add_argument("--new", type=Path, help="bundle of the new side (default: the base's)")
    parser.add_argument("--base-rev", default="", help="git revision that the base side runs (default: working tree)")
    parser.add_argument("--new-rev", default="", help="git revision that the new side runs (default: working tree)")
    parser.add_argument("--budget", type=float, default=0.025, help="slowdown that is allowed (default 0.025)")
    parser.add_argument("--minutes", type=float, default=3.0, help="at most; a pair has at least 20 rounds")
    parser.add_argument("--pairs", type=int, default=3, help="fresh processes a side (default 3)")
    parser.add_argument("--rows", type=int, default=1, help="rows decoded together")
    parser.add_argument("--burst", type=int, default=1, help="steps a turn; more where steps overlap on a device")
    parser.add_argument("--words", type=int, default=48, help="words a prompt")
    parser.add_argument("--cores", help="such as 0,1: both sides run on these (default: all)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what a step is timed by")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of latency_gate.json and .png")
    args = parser.parse_args(arguments)
    for name in ("budget", "minutes", "pairs", "rows", "burst", "words"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} is {getattr(args, name)}: give more than 0")
    return args


def main(arguments: list[str] | None = None, child: Path = CHILD) -> int:
    args = parse_args(arguments)
    allowed = os.sched_getaffinity(0)
    try:
        cores = sorted(int(core) for core in args.cores.split(",")) if args.cores else sorted(allowed)
        if not set(cores) <= allowed:
            raise GateError(f"--cores {args.cores}: this process may use {sorted(allowed)}")
        base = Source("base", args.base, args.base_rev, child)
        new = Source("new", args.new or args.base, args.new_rev, child)
        shape = Shape(args.rows, args.words, args.burst, clock=args.clock)
        plan = Plan(args.budget, args.minutes * 60, args.pairs, args.seed)
        return 1 if run_gate((base, new), shape, plan, cores, args.out).verdict == "regression" else 0
    except (GateError, ValueError, OSError) as error:
        print(f"latency_gate: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

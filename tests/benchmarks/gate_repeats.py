"""Repeats of the latency gate on an identical pair and on a planted 5% slowdown (by hand; minutes).

python tests/benchmarks/gate_repeats.py BUNDLE --kind same --repeats 20 --core 0 --rev HEAD
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
os.environ["PYTHONPATH"] = str(ROOT / "benchmarks")  # where the planted child finds the child that it wraps

from gate_measure import Plan, Shape  # noqa: E402
from gate_side import CHILD, GateError, Source  # noqa: E402
from latency_gate import run_gate  # noqa: E402
from machine import OUT, save_result  # noqa: E402

SLOW = Path(__file__).resolve().parent / "slow_side.py"
WANTED = {"same": "pass", "slow": "regression"}


def repeat(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One whole run of the gate: fresh processes, prompts of its own."""
    child = SLOW if args.kind == "slow" else CHILD
    sources = (Source("base", args.bundle, args.rev), Source("new", args.bundle, args.rev, child))
    plan = Plan(args.budget, args.seconds, args.pairs, seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        measured = run_gate(sources, Shape(clock=args.clock), plan, [args.core], Path(out))
    last = measured.looks[-1]
    return {
        "verdict": measured.verdict,
        "estimate": round(last.estimate, 4),
        "low": round(last.low, 4),
        "high": round(last.high, 4),
        "looks": len(measured.looks),
        "rounds": sum(len(pair.steps) for pair in measured.pairs),
        "median_ms": [round(s * 1e3, 2) for s in measured.medians()],
        "seconds": round(time.monotonic() - started, 1),
        "load": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--kind", choices=tuple(WANTED), required=True)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--budget", type=float, default=0.025)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="cpu")
    parser.add_argument("--rev", default="")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    done: list[dict[str, Any]] = []
    for seed in range(args.repeats):
        try:
            done.append(repeat(args, seed))
        except GateError as error:
            done.append({"verdict": f"error: {error}"})
        right = sum(one["verdict"] == WANTED[args.kind] for one in done)
        result = {"kind": args.kind, "budget": args.budget, "wanted": WANTED[args.kind], "right": right, "runs": done}
        path = save_result(f"latency_gate_{args.kind}", result, args.out)
        print(f"{args.kind}: {right} of {len(done)} {WANTED[args.kind]}, wrote {path}: {done[-1]}", flush=True)
    return 0 if right >= 0.95 * len(done) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Time of one decode step by rows and context, the Python part apart from the executor's (one run a call).

python benchmarks/decode_step.py engines/store/smollm2-135m --rows 1,8,32 --context 256
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from figures_table import FiguresTable
from machine import save_result
from rich.console import Console
from rich.progress import track

from ostinato.runtime import LLM, RuntimeConfig, SamplingParams
from ostinato.runtime.flight import StepTimes


def measure(llm: LLM, times: list[StepTimes], rows: int, context: int, steps: int) -> dict[str, Any]:
    """Medians over the pure decode steps of `rows` greedy requests that start at `context` tokens."""
    source = random.Random(rows * 1000 + context)
    vocabulary = llm.manifest.sizes.vocab_size
    prompts = [[source.randrange(100, vocabulary) for _ in range(context)] for _ in range(rows)]
    times.clear()
    llm.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True))
    decode = [step for step in times if step.num_rows == rows and step.num_tokens == rows][1:]
    python = statistics.median(step.plan + step.pack + step.commit for step in decode)
    run = statistics.median(step.launch + step.wait for step in decode)
    return {
        "rows": rows,
        "context": context,
        "steps": len(decode),
        "step_ms": round((python + run) * 1e3, 3),
        "executor_ms": round(run * 1e3, 3),
        "plan_ms": round(statistics.median(step.plan for step in decode) * 1e3, 4),
        "pack_ms": round(statistics.median(step.pack for step in decode) * 1e3, 4),
        "commit_ms": round(statistics.median(step.commit for step in decode) * 1e3, 4),
        "python_share": round(python / (python + run), 4),
        "tokens_per_s": round(rows / (python + run), 1),
    }


def print_rows(results: list[dict[str, Any]], title: str) -> None:
    columns = ("rows", "context", "step", "device", "plan", "pack", "commit", "python", "tokens/s")
    table = FiguresTable(f"{title}; milliseconds a step", *columns)
    for row in results:
        table.add(
            str(row["rows"]),
            str(row["context"]),
            *(f"{row[name]:.2f}" for name in ("step_ms", "executor_ms", "plan_ms", "pack_ms", "commit_ms")),
            f"{row['python_share']:.1%}",
            f"{row['tokens_per_s']:,.0f}",
        )
    table.show()


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return round(int(status.split("VmRSS:")[1].split()[0]) / 1024, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--context", default="256")
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()
    times: list[StepTimes] = []
    cases = [(int(rows), int(context)) for context in args.context.split(",") for rows in args.rows.split(",")]
    with LLM(args.bundle, RuntimeConfig(prefix_cache=False), observe_step=times.append) as llm:
        console = Console(stderr=True)
        shown = track(cases, "decode steps", transient=True, console=console, disable=not console.is_terminal)
        results = [measure(llm, times, *case, args.steps) for case in shown]
        manifest, memory = llm.manifest, resident_mib()
    print_rows(results, f"{manifest.name}: weights {manifest.weights}, KV {manifest.kv_cache}")
    pool = manifest.kv_bytes_per_block * manifest.limits.num_blocks / 2**20
    weights = manifest.weight_bytes / 2**20
    ratio = (memory - pool) / weights
    print(f"resident {memory} MiB = {ratio:.2f} × weights ({weights:.0f} MiB) + KV pool ({pool:.0f} MiB)")
    sizes = {"resident_mib": memory, "weights_mib": round(weights, 1), "kv_pool_mib": round(pool, 1)}
    precision = {"bundle": manifest.name, "weights": manifest.weights, "kv_cache": manifest.kv_cache}
    print("wrote", save_result("decode_step", precision | sizes | {"steps": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

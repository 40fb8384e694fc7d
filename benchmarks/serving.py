"""Open-loop load on any OpenAI-compatible server: Poisson arrivals, TTFT, TPOT, ITL, E2E and goodput (one run a call).

python benchmarks/serving.py http://127.0.0.1:8000 --rate 4 --requests 100 --goodput ttft:500 tpot:60

The client keeps bytes and times, and reads them once all streams have ended (raw_client.py).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop
from figures_table import FiguresTable
from machine import machine, save_result
from raw_client import SILENT_SECONDS, Address, RawStream
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from workload import Arrival, poisson_arrivals

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_read=120)
PERCENTILES = (50, 90, 99)


@dataclass
class Record:
    """What one request saw; times are seconds on the run's clock."""

    sent: float
    token_times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """TTFT, TPOT (mean gap after the first token) and E2E in milliseconds."""
        first, last = self.token_times[0], self.token_times[-1]
        gaps = max(1, self.num_tokens - 1)
        return {"ttft": (first - self.sent) * 1e3, "tpot": (last - first) / gaps * 1e3, "e2e": (last - self.sent) * 1e3}


async def send(address: Address, model: str, arrival: Arrival, start: float) -> RawStream | str:
    """Stream one completion; its bytes once all have come, or why there are none."""
    body = {
        "model": model,
        "prompt": arrival.prompt,
        "max_tokens": arrival.max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    await asyncio.sleep(max(0.0, start + arrival.at - time.perf_counter()))
    try:
        stream = await address.stream("/v1/completions", body)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    while not stream.done.done():
        await asyncio.wait({stream.done}, timeout=SILENT_SECONDS)
        stream.look()
    return stream


def record_of(sent: RawStream | str, start: float) -> Record:
    """What a request saw."""
    if isinstance(sent, str):
        return Record(0.0, error=sent)
    reply = sent.read()
    return Record(sent.began_at - start, [at - start for at in reply.token_times], reply.num_tokens, reply.error)


async def run_load(url: str, model: str, arrivals: list[Arrival], *, quiet: bool = False) -> tuple[list[Record], float]:
    """Send every arrival at its time; returns the records and the seconds from the first send to the last token."""
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    address = Address.of(url)
    with Progress(*columns, disable=quiet) as progress:
        bar = progress.add_task("", total=len(arrivals))
        start = time.perf_counter()
        tasks = [asyncio.create_task(send(address, model, arrival, start)) for arrival in arrivals]
        for task in tasks:
            task.add_done_callback(lambda _: progress.advance(bar))
        sent = await asyncio.gather(*tasks)
    records = [record_of(one, start) for one in sent]
    done = [record.token_times[-1] for record in records if not record.error]
    return records, max(done, default=0.0)


def summarize(records: list[Record], seconds: float, goals: dict[str, float]) -> dict[str, Any]:
    """Percentiles in milliseconds, throughput, and the requests a second that met every goal."""
    good = [record for record in records if not record.error]
    rows = [record.metrics for record in good]
    series = {name: np.array([row[name] for row in rows]) for name in ("ttft", "tpot", "e2e")}
    series["itl"] = np.concatenate([np.diff(record.token_times) * 1e3 for record in good] or [np.zeros(0)])
    met = sum(all(row[name] <= goal for name, goal in goals.items()) for row in rows)
    return {
        "requests": len(records),
        "errors": len(records) - len(good),
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(sum(record.num_tokens for record in good) / seconds, 2) if seconds else 0.0,
        "requests_per_s": round(len(good) / seconds, 3) if seconds else 0.0,
        "goodput_requests_per_s": round(met / seconds, 3) if seconds else 0.0,
        "ms": {
            name: {"mean": round(float(values.mean()), 2)}
            | {f"p{p}": round(float(np.percentile(values, p)), 2) for p in PERCENTILES}
            for name, values in series.items()
            if values.size
        },
    }


def print_summary(summary: dict[str, Any]) -> None:
    title = f"{summary['requests']} requests, {summary['errors']} errors, {summary['seconds']} s"
    table = FiguresTable(title, "ms", "mean", *(f"p{p}" for p in PERCENTILES), num_texts=1)
    for name, values in summary["ms"].items():
        table.add(name, *(f"{value:.1f}" for value in values.values()))
    table.show()
    print(
        f"{summary['output_tokens_per_s']} output tokens/s, {summary['requests_per_s']} requests/s, "
        f"goodput {summary['goodput_requests_per_s']} requests/s"
    )


def plot(records: list[Record], path: Path) -> None:
    """A line a request from send to last token, its first token marked, over the cumulative tokens."""
    import matplotlib.pyplot as plt

    good = sorted((record for record in records if not record.error), key=lambda record: record.sent)
    figure, (lines, tokens) = plt.subplots(2, 1, figsize=(10, 7), sharex=True, height_ratios=(3, 1))
    for row, record in enumerate(good):
        lines.hlines(row, record.sent, record.token_times[0], color="#d9822b", linewidth=1.5)
        lines.hlines(row, record.token_times[0], record.token_times[-1], color="#2b7bba", linewidth=1.5)
    lines.set_ylabel("request")
    lines.set_title("orange: waiting for the first token; blue: streaming")
    times = np.sort(np.concatenate([record.token_times for record in good]))
    tokens.plot(times, np.arange(1, len(times) + 1), color="#2b7bba")
    tokens.set_ylabel("chunks")
    tokens.set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


async def first_model(url: str) -> str:
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session, session.get(f"{url}/v1/models") as response:
        return str((await response.json())["data"][0]["id"])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="base URL, without /v1")
    parser.add_argument("--model", help="default: the first that /v1/models names")
    parser.add_argument(
        "--rate", type=float, default=float("inf"), help="requests a second; default all at once (saturation)"
    )
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--input-words", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--goodput", nargs="*", default=[], metavar="NAME:MS", help="goals, such as ttft:500 tpot:60 e2e:5000"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="serving", help="results/NAME.json and .png")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    goals = {name: float(value) for name, _, value in (goal.partition(":") for goal in args.goodput)}
    if unknown := set(goals) - {"ttft", "tpot", "e2e"}:
        raise SystemExit(f"unknown goodput goals {sorted(unknown)}: give ttft, tpot or e2e")
    url = args.url.rstrip("/")
    try:
        model = args.model or asyncio.run(first_model(url))
    except aiohttp.ClientError as refused:
        raise SystemExit(f"no server answers at {url} ({refused}): start one, such as with make serve") from None
    arrivals = poisson_arrivals(args.requests, args.rate, args.input_words, args.output_tokens, args.seed)
    records, seconds = uvloop.run(run_load(url, model, arrivals))
    summary = summarize(records, seconds, goals)
    print_summary(summary)
    for error in sorted({record.error for record in records if record.error})[:5]:
        print("error:", error, file=sys.stderr)
    path = save_result(
        args.name, {"model": model, "client": machine(), "rate": str(args.rate), "goals_ms": goals} | summary
    )
    plot(records, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png').name}")
    return 1 if summary["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())

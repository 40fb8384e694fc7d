"""CPU time that serving costs, a request and a streamed token, over a model that costs nothing (one run).

python benchmarks/serving_cost.py engines/store/smollm2-135m --rounds 5

The server is a process of its own (null_server.py). Short and long answers are asked for in turn; two costs follow
from their two CPU times: cpu = requests * a + tokens * b. They are given for the asyncio thread, for which there are
goals, and for the whole process, so that what another thread does instead shows: there the loop's own steps count too.
The least of the rounds is what it takes while nobody else drives the thread out of its caches. --profile FILE keeps
where the time of the asyncio thread went, for pstats.
"""

from __future__ import annotations

import argparse
import asyncio
import pstats
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
from figures_table import FiguresTable
from machine import save_result
from saturation import free_port, until_ready
from serving import TIMEOUT, first_model
from workload import poisson_arrivals

SHORT, LONG = 2, 130  # tokens
Seconds = npt.NDArray[np.float64]  # [2]: a thread's and its process's
COSTS = ("request_ms", "token_us", "whole_request_ms")
ALL_COSTS = (*COSTS, *(f"process_{name}" for name in COSTS))
GOALS = {"request_ms": 1.0, "token_us": 40.0}
ROWS = 32


@contextmanager
def null_server(bundle: Path, profile: Path | None) -> Iterator[tuple[str, int]]:
    """Its URL and process id, until the block ends."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("null_server.py")), str(bundle), str(port)]
    process = subprocess.Popen(command + ([str(profile)] if profile else []), stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(until_ready(url, process))
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def cpu_seconds(pid: int) -> Seconds:
    """CPU time of a process's first thread, where asyncio runs, and of all that it ever had."""
    thread = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    return np.array([thread, time.clock_gettime((~pid << 3) | 2)])  # Linux's clock of another process


def body(endpoint: str, model: str, prompt: str, max_tokens: int, stream: bool) -> dict[str, Any]:
    asked = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    return asked | (
        {"messages": [{"role": "user", "content": prompt}]} if endpoint == "chat/completions" else {"prompt": prompt}
    )


async def ask_all(url: str, endpoint: str, bodies: list[dict[str, Any]]) -> None:
    """ROWS at once, each on a connection that stays."""
    waiting = iter(bodies)

    async def caller(session: aiohttp.ClientSession) -> None:
        for asked in waiting:
            async with session.post(f"{url}/v1/{endpoint}", json=asked) as response:
                last = b""
                async for part in response.content.iter_any():
                    last = part
                if response.status != 200 or (asked["stream"] and not last.endswith(b"data: [DONE]\n\n")):
                    raise SystemExit(f"HTTP {response.status} ended with {last[-300:]!r}")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=TIMEOUT) as session:
        await asyncio.gather(*(caller(session) for _ in range(ROWS)))


class Meter:
    """Asks, and reads what the server's thread took."""

    def __init__(self, url: str, pid: int, model: str) -> None:
        self._url, self._pid, self._model = url, pid, model
        self._seed = 0

    def seconds(self, endpoint: str, count: int, max_tokens: int, stream: bool) -> Seconds:
        self._seed += 1
        arrivals = poisson_arrivals(count, float("inf"), 64, max_tokens, self._seed)
        bodies = [body(endpoint, self._model, arrival.prompt, max_tokens, stream) for arrival in arrivals]
        before = cpu_seconds(self._pid)
        asyncio.run(ask_all(self._url, endpoint, bodies))
        time.sleep(0.05)
        return cpu_seconds(self._pid) - before

    def costs(self, endpoint: str, count: int) -> list[float]:
        """Milliseconds a streamed request, microseconds a streamed token, milliseconds a request that is not: of the
        asyncio thread, then of the process.
        """
        short = self.seconds(endpoint, 4 * count, SHORT, True) / (4 * count)
        long = self.seconds(endpoint, count, LONG, True) / count
        whole = self.seconds(endpoint, 4 * count, 1, False) / (4 * count)
        token = (long - short) / (LONG - SHORT)
        costs = np.stack([(short - SHORT * token) * 1e3, token * 1e6, whole * 1e3])
        return [float(cost) for cost in costs.T.ravel()]


def figures(rounds: list[list[float]], of: Callable[[tuple[float, ...]], float]) -> dict[str, float]:
    """`of` each cost over the rounds."""
    return {name: round(of(values), 4) for name, values in zip(ALL_COSTS, zip(*rounds, strict=True), strict=True)}


def show(medians: dict[str, dict[str, float]], least: dict[str, dict[str, float]]) -> None:
    """A line an endpoint and kind of CPU time."""
    columns = ("endpoint", "CPU time of", *(name.replace("_", "\n") for name in COSTS))
    table = FiguresTable("Median of the rounds (least)", *columns, num_texts=2)
    for endpoint, values in medians.items():
        for prefix, whose in (("", "asyncio's thread"), ("process_", "the process")):
            cells = [f"{values[prefix + name]:.3g} ({least[endpoint][prefix + name]:.3g})" for name in COSTS]
            table.add(endpoint, whose, *cells)
    table.show()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--requests", type=int, default=64, help="long answers a round; short ones are four times as many"
    )
    parser.add_argument("--profile", type=Path, help="write cProfile's statistics here, and show the largest")
    args = parser.parse_args()
    found: dict[str, list[list[float]]] = {"completions": [], "chat/completions": []}
    with null_server(args.bundle, args.profile) as (url, pid):
        meter = Meter(url, pid, asyncio.run(first_model(url)))
        for endpoint in found:
            meter.seconds(endpoint, 2 * ROWS, SHORT, True)  # the first of anything takes longer
        for _ in range(args.rounds):
            for endpoint, rounds in found.items():
                rounds.append(meter.costs(endpoint, args.requests))
    medians = {endpoint: figures(rounds, statistics.median) for endpoint, rounds in found.items()}
    least = {endpoint: figures(rounds, min) for endpoint, rounds in found.items()}
    show(medians, least)
    if args.profile is not None:
        pstats.Stats(str(args.profile)).sort_stats("tottime").print_stats(30)
        return 0  # a profile costs as much as what it looks at: its figures are no result
    result = {"bundle": args.bundle.name, "goals": GOALS, "medians": medians, "least": least, "rounds": found}
    print("wrote", save_result("serving_cost", result))
    missed = [
        f"{endpoint}: {name} {values[name]:.2f} is over its goal of {goal:g}"
        for endpoint, values in medians.items()
        for name, goal in GOALS.items()
        if values[name] > goal
    ]
    print("\n".join(missed), file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

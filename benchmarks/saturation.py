"""Serving against offline: the same requests over HTTP at saturation and by LLM.generate, in turn (one run a call).

python benchmarks/saturation.py engines/store/smollm2-135m --rounds 9

Each is first in every other round, so that a machine which grows faster or slower favours neither.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import uvloop
from figures_table import FiguresTable
from machine import save_result
from serving import TIMEOUT, Record, first_model, run_load
from workload import Arrival, poisson_arrivals

from ostinato.runtime import LLM, RuntimeConfig, SamplingParams

READY_SECONDS = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(bundle: Path) -> Iterator[str]:
    """`ostinato serve` on a free port of this machine, ended by SIGTERM; yields its URL once it is ready."""
    port = free_port()
    command = Path(sys.executable).parent / "ostinato"
    options = ["--port", str(port), "--metrics-port", "off", "--prefix-cache", "off"]
    process = subprocess.Popen([command, "serve", bundle, *options], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(until_ready(url, process))
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                async with session.get(f"{url}/health/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise SystemExit(f"the server at {url} did not become ready")


def serve_once(url: str, model: str, arrivals: list[Arrival]) -> float:
    """Output tokens a second through HTTP."""
    records: list[Record]
    seconds: float
    records, seconds = uvloop.run(run_load(url, model, arrivals, quiet=True))
    if failed := [record.error for record in records if record.error]:
        raise SystemExit(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return sum(record.num_tokens for record in records) / seconds


def generate_once(llm: LLM, arrivals: list[Arrival]) -> float:
    """Output tokens a second through LLM.generate."""
    start = time.perf_counter()
    params = [SamplingParams(temperature=0.0, max_tokens=arrival.max_tokens, ignore_eos=True) for arrival in arrivals]
    answers = llm.generate([arrival.prompt for arrival in arrivals], params)
    return sum(len(answer.choices[0].token_ids) for answer in answers) / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--input-words", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    args = parser.parse_args()
    table = FiguresTable(
        "Serving at saturation against offline", "round", "served tokens/s", "offline tokens/s", "ratio"
    )
    served, offline = [], []
    with server(args.bundle) as url, LLM(args.bundle, RuntimeConfig(prefix_cache=False)) as llm:
        model = asyncio.run(first_model(url))
        for number in range(args.rounds):
            arrivals = poisson_arrivals(args.requests, float("inf"), args.input_words, args.output_tokens, number)
            if number % 2:
                offline.append(generate_once(llm, arrivals))
            served.append(serve_once(url, model, arrivals))
            if not number % 2:
                offline.append(generate_once(llm, arrivals))
            table.add(str(number + 1), f"{served[-1]:.0f}", f"{offline[-1]:.0f}", f"{served[-1] / offline[-1]:.3f}")
    ratio = statistics.median(mine / theirs for mine, theirs in zip(served, offline, strict=True))
    table.show()
    print(f"median ratio {ratio:.3f}")
    result = {"bundle": str(args.bundle.name), "served": served, "offline": offline, "median_ratio": round(ratio, 4)}
    print("wrote", save_result("saturation", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""ostinato beside its peers on one machine, one model and one set of prompts; run by hand, offline.

    python benchmarks/peers.py --setup                     environments and models under .peers/ (once)
    python benchmarks/peers.py --bundle engines/store/NAME print the table, write build/benchmarks/peers.json

Every engine is a process of its own, loaded once. Rounds are interleaved: each shape goes round all engines before the
next one, and an engine is frozen (SIGSTOP) while it is not its turn. One measure for all, from the outside: token ids
in, tokens out, greedy, end-of-sequence ignored, other prompts in every call. With B rows of 256 tokens and N = 64,

    decode tokens/s = B·(N−1) / (t(N new tokens) − t(1 new token))       prefill = t(1 new token), one row of 512 tokens
"""

from __future__ import annotations

import argparse
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from peer_process import ALL_PEERS, HERE, PEERS, Engine, PeerError, Process, ostinato
from peer_report import Result, print_table, write_json
from peer_setup import setup

PROMPT_TOKENS = 256
PREFILL_TOKENS = 512
NEW_TOKENS = 64
WARMUP_TOKENS = 4
WARMUP_SEED = 1_000_000
TOKEN_IDS = range(100, 49_000)  # ordinary tokens of this vocabulary
CACHE_BLOCK = 32  # request lengths are rounded up to this
STORE = HERE.parent / "engines" / "store"


@dataclass(frozen=True)
class Settings:
    """What was asked for on the command line."""

    peers: list[str]
    bundles: list[Path]
    rows: list[int]
    rounds: int
    threads: int
    lock: Path | None
    output: Path

    @property
    def tokens(self) -> int:
        """The longest request, prompt and new tokens, in whole blocks."""
        longest = max(PROMPT_TOKENS + NEW_TOKENS, PREFILL_TOKENS + WARMUP_TOKENS)
        return -(-longest // CACHE_BLOCK) * CACHE_BLOCK


@dataclass
class Contender:
    """An engine in the race: its process while that lives, and its samples."""

    engine: Engine
    result: Result
    process: Process | None = None
    failed: set[int] = field(default_factory=set)  # row counts that it cannot do

    def fail(self, what: str, error: PeerError) -> None:
        """Keep the first message of a failure; the race goes on without it."""
        self.result.errors.append(f"{what}: {error}")
        print(f"  {self.engine.label}: {what}: {error}", flush=True)


def parse_args() -> tuple[Settings, bool]:
    """Settings, and whether to set up instead of measuring."""
    parser = argparse.ArgumentParser(description="ostinato beside its peers on this machine")
    parser.add_argument("--setup", action="store_true", help="make the peers' environments and models, then stop")
    parser.add_argument(
        "--peers", default=",".join(ALL_PEERS), help="comma-separated; empty for none (default: %(default)s)"
    )
    parser.add_argument(
        "--bundle", action="append", type=Path, help="a bundle to measure; repeatable (default: all in engines/store)"
    )
    parser.add_argument("--rows", default="1,8,32", help="row counts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--lock", type=Path, help="hold this file's lock around each timed call")
    parser.add_argument("--output", type=Path, default=HERE.parent / "build" / "benchmarks" / "peers.json")
    args = parser.parse_args()
    peers = [name for name in args.peers.split(",") if name]
    if unknown := set(peers) - set(ALL_PEERS):
        parser.error(f"found peers {sorted(unknown)}, wanted some of {sorted(ALL_PEERS)}")
    bundles = args.bundle if args.bundle is not None else sorted(path.parent for path in STORE.glob("*/manifest.json"))
    rows = sorted({int(count) for count in args.rows.split(",")})
    return Settings(peers, bundles, rows, args.rounds, args.threads, args.lock, args.output), args.setup


def prompts_for(rows: int, length: int, seed: int) -> list[list[int]]:
    """Token ids that no other call with another seed shares a prefix with."""
    chooser = random.Random(seed)
    return [chooser.choices(TOKEN_IDS, k=length) for _ in range(rows)]


def load(engine: Engine, settings: Settings) -> Contender:
    """Start the driver and load the model; a failure is kept, not raised."""
    contender = Contender(engine, Result(engine.name, engine.label))
    print(f"loading {engine.label}", flush=True)
    try:
        contender.process = Process(engine, PEERS / f"{engine.name.replace(':', '-')}.log", settings.lock)
        sizes = {"rows": max(settings.rows), "tokens": settings.tokens, "threads": settings.threads}
        loaded = contender.process.ask("load", model=str(engine.model), **sizes)
    except PeerError as error:
        contender.fail("load", error)
        if contender.process:
            contender.process.close()
            contender.process = None
        return contender
    contender.result.precision, contender.result.versions = loaded["precision"], loaded["versions"]
    contender.result.notes = loaded["notes"]
    return contender


def timed(process: Process, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds of one call, after checking that it did the work."""
    reply = process.ask("generate", prompts=prompts, new_tokens=new_tokens)
    lengths = {len(tokens) for tokens in reply["tokens"]}
    if len(reply["tokens"]) != len(prompts) or lengths != {new_tokens}:
        raise PeerError(
            f"found {len(reply['tokens'])} rows of {sorted(lengths)} tokens, wanted {len(prompts)} of {new_tokens}"
        )
    return float(reply["seconds"])


def warm_up(contender: Contender, settings: Settings) -> None:
    """Each shape once, untimed."""
    for rows, length in [(1, PREFILL_TOKENS), *((rows, PROMPT_TOKENS) for rows in settings.rows)]:
        try:
            if contender.process:
                timed(contender.process, prompts_for(rows, length, seed=WARMUP_SEED + rows), WARMUP_TOKENS)
        except PeerError as error:
            contender.failed.add(rows)
            contender.fail(f"warm-up, {rows} × {length} tokens", error)


def measure(contender: Contender, rows: int | None, seed: int) -> None:
    """One sample of one shape: a row count, or None for the prefill."""
    if contender.process is None or (rows or 1) in contender.failed:
        return
    try:
        if rows is None:
            seconds = timed(contender.process, prompts_for(1, PREFILL_TOKENS, seed), 1)
            contender.result.prefill_ms.append(seconds * 1e3)
            return
        first = timed(contender.process, prompts_for(rows, PROMPT_TOKENS, seed), 1)
        whole = timed(contender.process, prompts_for(rows, PROMPT_TOKENS, seed + 1), NEW_TOKENS)
    except PeerError as error:
        contender.failed.add(rows or 1)
        contender.fail("prefill" if rows is None else f"{rows} rows", error)
        return
    contender.result.seconds.setdefault(rows, []).append((first, whole))
    if whole > first:
        contender.result.decode.setdefault(rows, []).append(rows * (NEW_TOKENS - 1) / (whole - first))
    else:
        contender.result.errors.append(
            f"{rows} rows: a call of {NEW_TOKENS} tokens took no longer than one of 1 token; sample dropped"
        )


def race(settings: Settings) -> list[Result]:
    """Load all, warm all up, then go round."""
    engines = [ostinato(bundle) for bundle in settings.bundles] + [ALL_PEERS[name] for name in settings.peers]
    contenders = []
    try:
        for engine in engines:
            contenders.append(load(engine, settings))
            warm_up(contenders[-1], settings)
        for number in range(settings.rounds):
            print(f"round {number + 1} of {settings.rounds}", flush=True)
            for rows in [None, *settings.rows]:
                for contender in contenders:
                    measure(contender, rows, seed=2 * (number * (max(settings.rows) + 1) + (rows or 0)))
    finally:
        for contender in contenders:
            if contender.process:
                contender.process.close()
    return [contender.result for contender in contenders]


def main() -> None:
    """Set up, or measure and report."""
    settings, only_setup = parse_args()
    if only_setup:
        setup(settings.peers)
        return
    PEERS.mkdir(exist_ok=True)
    results = race(settings)
    shapes = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "prefill_tokens": PREFILL_TOKENS}
    write_json(
        settings.output,
        results,
        {"rows": settings.rows, "rounds": settings.rounds, "threads": settings.threads, **shapes},
    )
    print_table(results, settings.rows)


if __name__ == "__main__":
    main()

"""The JSON-lines protocol between `peers.py` and an engine's driver; driver side runs inside the engine's own process.

One request a line on stdin, one reply a line on stdout. Standard library only: every engine has its own environment.

    {"op": "load", "model": DIR, "rows": 32, "tokens": 544, "threads": 2}
        → {"precision": …, "versions": {…}, "notes": …}
    {"op": "generate", "prompts": [[id, …], …], "new_tokens": n}
        → {"seconds": s, "tokens": [[id, …], …]}

A driver that cannot do what was asked answers {"error": "Type: message"} and stays alive.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

ERROR_CHARS = 400


@dataclass(frozen=True)
class LoadRequest:
    """What a driver needs to size its engine: the folder made for it, and the largest batch it will see."""

    model: str
    rows: int
    tokens: int  # prompt and new tokens of the longest request
    threads: int


@dataclass(frozen=True)
class Loaded:
    """What a driver says about itself once loaded."""

    precision: str
    versions: dict[str, str] = field(default_factory=dict)
    notes: str = ""


class Driver(Protocol):
    """An engine under test: greedy, end-of-sequence ignored, no prefix cache."""

    def load(self, request: LoadRequest) -> Loaded:
        """Load the model once."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Return exactly `new_tokens` ids for every prompt, all prompts in one batch."""


def versions_of(*packages: str) -> dict[str, str]:
    """Installed versions of the packages that matter for an engine's speed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def serve(driver: Driver) -> None:
    """Answer requests until stdin closes; whatever the engine prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = _answer(driver, json.loads(line))
        except Exception as error:  # the parent shows it in the table: a peer's failure is a result
            reply = {"error": f"{type(error).__name__}: {error}"[:ERROR_CHARS]}
        replies.write(json.dumps(reply) + "\n")


def _answer(driver: Driver, request: dict[str, Any]) -> dict[str, Any]:
    operation = request.pop("op")
    if operation == "load":
        return asdict(driver.load(LoadRequest(**request)))
    if operation == "generate":
        start = time.perf_counter()
        tokens = driver.generate(request["prompts"], request["new_tokens"])
        return {"seconds": time.perf_counter() - start, "tokens": tokens}
    raise ValueError(f"found operation {operation!r}, wanted load or generate")

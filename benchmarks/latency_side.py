"""One side of `latency_gate.py`, in a process of its own: decodes a few steps when asked, and says how long each took.

One JSON request a line on stdin, one reply a line on stdout:

    {"op": "open", "bundle": DIR, "cores": [0, 1], "rows": 1}      → what was opened
    {"op": "prompt", "prompts": [TEXT, …], "max_tokens": n}        → {"wall": [s], "cpu": [s]}
    {"op": "decode", "steps": n}                                   → {"wall": [s, …], "cpu": [s, …]}

What a prompt takes is its time to first token, of the first prompt, which runs alone. "cpu" counts the seconds of all
threads of this process. A request that fails is answered with {"error": …}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Burden = Callable[[float], None]  # called with each step's CPU seconds, within the step
ERROR_CHARS = 400
PR_SET_PDEATHSIG = 1  # Linux: which signal comes when the parent ends


@dataclass(frozen=True)
class Now:
    """A moment on both clocks."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Step:
    """What a step held and when it ended."""

    ended: Now
    num_rows: int
    num_tokens: int


def now() -> Now:
    return Now(time.perf_counter(), time.process_time())


class Side:
    """A warm `LLM` with as many streams open as the batch has rows; the first one drives the steps of all."""

    def __init__(self, burden: Burden | None = None) -> None:
        self._burden = burden
        self._streams: list[Any] = []  # iterators that can be closed
        self._steps: list[Step] = []
        self._started = now()

    def open(self, bundle: str, cores: list[int], rows: int) -> dict[str, Any]:
        """Load the bundle on `cores` alone; threads that libraries start inherit them."""
        os.sched_setaffinity(0, cores)
        import ostinato.runtime as runtime

        self._rows = rows
        self._params: Any = runtime.SamplingParams
        config = runtime.RuntimeConfig(prefix_cache=False, num_threads=len(cores))
        self._llm: Any = runtime.LLM(bundle, config, progress=False, observe_step=self._observe)
        manifest = json.loads((Path(bundle) / "manifest.json").read_text())
        identity = {name: manifest.get(name) for name in ("name", "target", "identity", "weights", "kv_cache")}
        return identity | {"bundle": bundle, "package": str(Path(str(runtime.__file__)).parent)}

    def prompt(self, prompts: list[str], max_tokens: int) -> dict[str, Any]:
        """End what was decoding and open a stream a prompt, up to its first token."""
        for stream in reversed(self._streams):
            stream.close()
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._streams = [self._llm.stream(prompt, params) for prompt in prompts]
        num_tokens = len(self._llm.encode(prompts[0]))
        self._begin()
        for stream in self._streams:
            next(stream)
        seen = 0
        for step in self._steps:
            if (seen := seen + step.num_tokens) >= num_tokens:
                return _spans([self._started, step.ended])
        raise RuntimeError("a first token came before its prompt was computed")

    def decode(self, steps: int) -> dict[str, Any]:
        """Run `steps` steps of all rows, or a few more where a token shows no text by itself."""
        self._begin()
        while len(self._steps) < steps:
            next(self._streams[0])
        if any((step.num_rows, step.num_tokens) != (self._rows, self._rows) for step in self._steps):
            raise RuntimeError(f"found steps {self._steps}, wanted {self._rows} rows of one token each")
        return _spans([self._started, *(step.ended for step in self._steps)])

    def _begin(self) -> None:
        self._steps.clear()
        self._started = now()

    def _observe(self, times: Any) -> None:
        if self._burden is not None:
            last = self._steps[-1].ended if self._steps else self._started
            self._burden(now().cpu - last.cpu)
        self._steps.append(Step(now(), times.num_rows, times.num_tokens))


def _spans(moments: list[Now]) -> dict[str, list[float]]:
    """Seconds from each moment to the next."""
    pairs = list(pairwise(moments))
    return {
        "wall": [end.wall - start.wall for start, end in pairs],
        "cpu": [end.cpu - start.cpu for start, end in pairs],
    }


def serve(side: Side) -> None:
    """Answer requests until stdin closes; whatever libraries print goes to stderr."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a frozen child would outlive a killed gate
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    operations: dict[str, Callable[..., Any]] = {"open": side.open, "prompt": side.prompt, "decode": side.decode}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = operations[request.pop("op")](**request)
        except Exception as error:  # the gate names the side and ends with it
            kind = "" if type(error).__module__.startswith("ostinato.") else f"{type(error).__name__}: "
            reply = {"error": f"{kind}{error}"[:ERROR_CHARS]}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    serve(Side())

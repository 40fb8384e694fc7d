"""What the console shows, as JSON: the engine between two steps, its last steps and requests (at most 5 a second)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from .bridge import Bridge
from .call import CallRecord
from .door import Door
from .engine_view import BLOCK_STATES, EngineView, run_lengths
from .latency_series import BIN_SECONDS, NUM_BINS, Latencies
from .server_debug import call_json
from .step_log import StepRecord
from .timeline import REASONS

logger = logging.getLogger(__name__)

KEEP_SECONDS = 0.2  # a snapshot serves every page that asks meanwhile
PATIENCE_SECONDS = 1.0  # for a step to end; then the page gets the snapshot before, and its age
NUM_CALLS = 12
_STATE_NAMES = {"f": "free", "c": "cached", "p": "private", "s": "shared", "n": "null"}


class ConsoleState:
    """Looks at the engine on behalf of every open page."""

    def __init__(self, door: Door, now: Callable[[], float] = time.monotonic) -> None:
        self._door = door
        self._now = now
        self._look: asyncio.Future[EngineView] | None = None
        self._view: tuple[float, dict[str, Any]] | None = None  # when it was made

    async def snapshot(self) -> dict[str, Any]:
        """The newest state; `age_seconds` is that of its rows and blocks. ClosedError before the model is loaded."""
        served = self._door.served()
        bridge = served.bridge
        if self._view is None or self._now() - self._view[0] >= KEEP_SECONDS:
            await self._renew(bridge)
        made_at, engine = self._view or (None, None)
        return {
            "model": served.name,
            "trouble": self._door.trouble(),
            "age_seconds": None if made_at is None else round(self._now() - made_at, 3),
            "limits": _limits(bridge),
            "engine": engine,
            "steps": steps_json(bridge.ledger.steps.last()),
            "recent": recent_json(bridge.ledger.recent.last()),
            "latency": _latency(bridge.latencies),
        }

    async def _renew(self, bridge: Bridge) -> None:
        """Look again, and wait a while for what is seen."""
        if self._look is None or self._look.done():
            self._look = bridge.look()
            self._look.add_done_callback(self._take)
        await asyncio.wait({self._look}, timeout=PATIENCE_SECONDS)

    def _take(self, look: asyncio.Future[EngineView]) -> None:
        if look.cancelled():
            return
        if (error := look.exception()) is not None:
            logger.error("the engine could not be looked at: %s", error, exc_info=error)
        else:
            self._view = self._now(), engine_json(look.result())


def _limits(bridge: Bridge) -> dict[str, Any]:
    limits = bridge.limits
    return {
        "max_rows": limits.max_rows,
        "max_step_tokens": limits.max_step_tokens,
        "max_context": limits.max_context,
        "block_size": limits.block_size,
        "num_blocks": limits.num_blocks,
    }


def engine_json(view: EngineView) -> dict[str, Any]:
    """Rows, queue and block map of one moment. The counts of blocks add up to the pool."""
    states = view.block_states()
    counts = np.bincount(np.frombuffer(states, np.uint8), minlength=len(BLOCK_STATES)).tolist()
    return {
        "rows": [row._asdict() for row in view.rows],
        "num_running": view.num_running,
        "num_waiting": view.num_waiting,
        "num_hidden": view.num_hidden,
        "queue": {reason: view.num_waiting if reason == view.reason else 0 for reason in REASONS},
        "num_preemptions": view.num_preemptions,
        "num_evictions": view.num_evictions,
        "prefix_queries": view.num_prefix_queries,
        "prefix_hits": view.num_prefix_hits,
        "blocks": {
            "map": run_lengths(states),
            "counts": {_STATE_NAMES[letter]: count for letter, count in zip(BLOCK_STATES, counts, strict=True)},
        },
    }


def steps_json(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """The last steps by bucket."""
    buckets: dict[int, dict[str, int]] = {}
    for step in steps:
        line = buckets.setdefault(step.bucket, {"bucket": step.bucket, "steps": 0, "tokens": 0, "padding": 0})
        line["steps"] += 1
        line["tokens"] += step.times.num_tokens
        line["padding"] += step.padding
    return {"steps": len(steps), "buckets": [buckets[bucket] for bucket in sorted(buckets)]}


def recent_json(records: Sequence[CallRecord]) -> list[dict[str, Any]]:
    """The last calls that got as far as the queue, the newest first."""
    return [call_json(record) for record in islice((one for one in reversed(records) if one.num_choices), NUM_CALLS)]


def _latency(latencies: Latencies) -> dict[str, Any]:
    return {
        "bin_seconds": BIN_SECONDS,
        "num_bins": NUM_BINS,
        "first_token": [point._asdict() for point in latencies.first_token.points()],
        "between_tokens": [point._asdict() for point in latencies.between_tokens.points()],
    }

"""The engine as the console sees it: copies that agree with each other, made between two steps (per look)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .loop import Loop
from .pages import NULL_BLOCK
from .request import Request, Status
from .scheduler import Scheduler

MAX_ROWS_SHOWN = 128
BLOCK_STATES = "fcpsn"  # free, cached, private, shared, null
_MANY = 255
_FREE, _CACHED, _PRIVATE, _SHARED, _NULL = range(len(BLOCK_STATES))


class RowView(NamedTuple):
    """One request's progress; never its text."""

    id: int
    state: str  # queue | prefill | decode
    num_prompt: int
    num_output: int
    max_tokens: int
    num_computed: int
    num_cached: int
    num_blocks: int
    num_preemptions: int
    priority: int


@dataclass(frozen=True)
class EngineView:
    """Rows that run come first, then who waits; `num_hidden` of them are beyond what is shown. `reason`: why they wait.

    `holders`: of each block; `cached`: blocks that nobody holds and whose content can still be shared.
    """

    rows: tuple[RowView, ...]
    num_running: int
    num_waiting: int
    num_hidden: int
    reason: str
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_evictions: int
    holders: list[int]
    cached: list[int]

    @classmethod
    def of(cls, scheduler: Scheduler, requests: Sequence[Request], reason: str) -> EngineView:
        """On the loop's thread: `requests` may have ended meanwhile."""
        scheduler.settle()
        live = [request for request in requests if request.status is not Status.FINISHED]
        live.sort(key=lambda request: request.status is Status.WAITING)
        holders, cached = scheduler.pages.books()
        return cls(
            tuple(map(_row, live[:MAX_ROWS_SHOWN])),
            scheduler.num_running,
            scheduler.num_waiting,
            max(0, len(live) - MAX_ROWS_SHOWN),
            reason,
            scheduler.num_preemptions,
            scheduler.num_prefix_queries,
            scheduler.num_prefix_hits,
            scheduler.pages.num_evictions,
            holders,
            cached,
        )

    def block_states(self) -> bytes:
        """The state of each block, as an index into BLOCK_STATES."""
        try:
            holders = np.frombuffer(bytes(self.holders), np.uint8)  # twice as fast as from a list
        except ValueError:  # a block with more than 255 holders
            holders = np.minimum(np.array(self.holders, np.int64), _MANY).astype(np.uint8)
        states = np.minimum(holders, 2)
        states[states > 0] += _PRIVATE - 1
        states[self.cached] = _CACHED
        states[NULL_BLOCK] = _NULL
        return states.tobytes()


def _row(request: Request) -> RowView:
    num_tokens = len(request.tokens)
    if request.status is Status.WAITING:
        state = "queue"
    else:
        state = "decode" if num_tokens - request.num_computed <= 1 else "prefill"
    return RowView(
        request.id,
        state,
        request.num_prompt,
        num_tokens - request.num_prompt,
        request.max_tokens,
        request.num_computed,
        request.num_cached,
        len(request.blocks),
        request.num_preemptions,
        request.priority,
    )


def look_at(loop: Loop, requests: Sequence[Request], home: asyncio.AbstractEventLoop) -> asyncio.Future[EngineView]:
    """Look between two steps, on the loop's thread; the future is `home`'s."""
    seen: asyncio.Future[EngineView] = home.create_future()

    def tell(outcome: EngineView | Exception) -> None:
        if isinstance(outcome, Exception):
            seen.set_exception(outcome)
        else:
            seen.set_result(outcome)

    def see() -> None:
        try:
            outcome: EngineView | Exception = EngineView.of(loop.scheduler, requests, loop.clock.reason)
        except Exception as error:  # who only looks must not end the loop
            outcome = error
        home.call_soon_threadsafe(tell, outcome)

    loop.ask(see)
    return seen


def run_lengths(states: bytes) -> str:
    """Block states as letters with counts, such as `n1p3f12`: a pool that is used in order takes a few characters."""
    codes = np.frombuffer(states, np.uint8)
    starts = np.flatnonzero(np.diff(codes, prepend=np.uint8(255)))
    lengths = np.diff(starts, append=len(codes))
    return "".join(
        f"{BLOCK_STATES[code]}{length}" for code, length in zip(codes[starts].tolist(), lengths.tolist(), strict=True)
    )

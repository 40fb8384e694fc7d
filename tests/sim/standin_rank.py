"""A rank without a bundle's engines: its step is one number a row, which crosses slices and stages on the device."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.engines.errors import DeviceError
from ostinato.plugins.sampling_rows import I32, Sampled
from ostinato.runtime.batch import Batch
from ostinato.runtime.cuda import Device
from ostinato.runtime.executor import StepRules
from ostinato.runtime.libraries import Libraries
from ostinato.runtime.nccl import NcclLinks
from ostinato.runtime.progress import Show
from ostinato.runtime.rank import RankParts, RankSetup, num_in_flight

from .driver import SimDriver
from .nccl import SimNccl

_ROWS = 8


@dataclass(frozen=True)
class Mishap:
    """What befalls rank `rank` when it launches its `step`-th step; "refuse", "stand": at its start. See `_MISHAPS`."""

    what: str = ""
    rank: int = -1
    step: int = 0


def standin_libraries(setup: RankSetup, mishap: Mishap) -> Libraries:
    driver = SimDriver(num_devices=setup.shards.num_ranks)
    return Libraries(driver, None, SimNccl(driver), driver.clock.now, driver.clock.sleep)


def standin_executor(setup: RankSetup, libraries: Libraries, links: NcclLinks, progress: Show) -> StandInExecutor:
    mishap: Mishap = setup.parts.arguments[0]
    if mishap.rank == setup.rank and mishap.what == "refuse":
        raise DeviceError("the GPU is made of cardboard: buy another")
    if mishap.rank == setup.rank and mishap.what == "stand":
        os.kill(os.getpid(), signal.SIGSTOP)
    progress("stand in", 1, 1)
    return StandInExecutor(setup, libraries, links)


def standin_parts(mishap: Mishap | None = None) -> RankParts:
    return RankParts(standin_libraries, standin_executor, (mishap or Mishap(),))


class StandInTicket:
    def __init__(self, executor: StandInExecutor, slot: int, count: int) -> None:
        self._executor, self._slot, self._count = executor, slot, count
        self.late: I32 | None = None

    def sample(self, masks: I32) -> None:
        self.late = masks.copy()

    def wait(self) -> Sampled:
        return self._executor.finish(self._slot, self._count, self.late)


class StandInExecutor:
    """Token of a row = Σ over stages and slices of (id + 1) * 10^rank: every rank leaves its mark, once."""

    def __init__(self, setup: RankSetup, libraries: Libraries, links: NcclLinks) -> None:
        self._setup, self._links, self._mishap = setup, links, setup.parts.arguments[0]
        stages = setup.shards.pipeline_parallel
        count = num_in_flight(setup.shards)
        self.rules = StepRules((0,) * (_ROWS + 1), num_in_flight=count, feeds_tokens=stages == 1, keeps_state=True)
        self.trouble: str | None = None
        self.coverage = None
        self._driver: SimDriver = libraries.driver
        self._device = Device(setup.rank, libraries.driver, clock=libraries.clock, sleep=libraries.sleep)
        self._stream = self._device.stream()
        self._own, self._passed = (self._device.allocate(4 * _ROWS, name) for name in ("own", "passed"))
        self._slots = [self._device.allocate_pinned(8 * _ROWS, "a step") for _ in range(count)]
        self._events = [self._device.event() for _ in range(count)]
        self._num_steps, self._num_waiting = 0, 0

    def run(self, batch: Batch) -> StandInTicket:
        self._device.make_current()
        shard, stream = self._setup.shard, self._stream
        slot, count = self._num_steps % len(self._slots), batch.num_sampled
        self._num_steps += 1
        self._suffer()
        self._num_waiting += 1
        assert self._num_waiting <= self.rules.num_in_flight
        numbers = self._slots[slot].view.view(np.int32)
        numbers[:count] = (batch.input_ids[batch.logits_indices] + 1) * 10**self._setup.rank
        stream.upload(self._own.address, self._slots[slot].address, 4 * _ROWS)
        if shard.tensor_parallel > 1:
            self._links.all_reduce(self._own.address, self._own.address, count, "int32", stream)
        if not shard.is_first_stage:
            self._links.receive(self._passed.address, count, "int32", stream)
            self._driver.submit(stream.address, "add", self._add)
        if not shard.is_last_stage:
            self._links.send(self._own.address, count, "int32", stream)
        stream.download(self._slots[slot].address + 4 * _ROWS, self._own.address, 4 * _ROWS)
        stream.record(self._events[slot])
        return StandInTicket(self, slot, count)

    def _add(self) -> None:
        own, passed = (self._driver.memory.view(one.address, "int32", (_ROWS,)) for one in (self._own, self._passed))
        own += passed

    def finish(self, slot: int, count: int, late: I32 | None) -> Sampled:
        self._device.make_current()
        self._events[slot].wait("a step")
        self._num_waiting -= 1
        numbers = self._slots[slot].view.view(np.int32)
        tokens = numbers[_ROWS : _ROWS + count].copy()
        if late is not None:
            tokens += late.sum(dtype=np.int32)
        empty = np.zeros((count, 0))
        return Sampled(tokens, np.zeros(count, np.float32), empty.astype(np.int32), empty.astype(np.float32))

    def close(self) -> None:
        self._device.make_current()
        self._device.close()

    def _suffer(self) -> None:
        if (self._mishap.rank, self._mishap.step) == (self._setup.rank, self._num_steps):
            _MISHAPS[self._mishap.what]()


def _fail() -> None:
    raise DeviceError("the step is bewitched: wait for the moon")


_MISHAPS: dict[str, Any] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "fail": _fail,
    "hang": lambda: time.sleep(1000),
    "crash": lambda: [][0],
}


def standin_tokens(ids: I32, num_ranks: int) -> I32:
    """What all ranks together make of these input ids."""
    factor = sum(10**rank for rank in range(num_ranks))
    tokens: I32 = ((ids + 1) * factor).astype(np.int32)
    return tokens

"""A simulated device whose engines and kernels do nothing but make tokens, with its calls timed (per benchmark)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuda.bindings.driver import CUresult

from ostinato.engines.sizes import Limits
from ostinato.runtime.batch import Packer
from ostinato.runtime.garbage import settle_garbage
from ostinato.runtime.loop import Loop
from ostinato.runtime.pages import Pages
from ostinato.runtime.scheduler import Scheduler
from tests.sim.driver import SimDriver
from tests.sim.kernels import Grid
from tests.sim.memory import DeviceMemory
from tests.sim.sim_bundle import SimulatedRank, simulated
from tests.sim.standin_builds import tiny_bundle
from tests.sim_desk import SimDesk, open_desk

TOKEN = 7


class TimedDriver:
    """The simulated driver, with the seconds and the number of its calls.

    A query finds the work done, as the host of a fast device would: the simulation's own way, a piece of work a query,
    would count its pieces as the runtime's polls.
    """

    def __init__(self, driver: SimDriver) -> None:
        self.seconds, self.calls = 0.0, 0
        self._driver = driver
        for name in dir(driver):
            if name.startswith("cu"):
                setattr(self, name, self._timed(getattr(driver, name)))

    def host_clock(self) -> float:
        """Seconds without those in the driver's calls."""
        return time.perf_counter() - self.seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        is_query = function.__name__ == "cuEventQuery"

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            answer = function(*arguments)
            while is_query and answer[0] == CUresult.CUDA_ERROR_NOT_READY:
                answer = function(*arguments)
            self.calls += 1
            self.seconds += time.perf_counter() - started
            return answer

        return timed


def null_limits(max_rows: int, max_context: int) -> Limits:
    """Room for `max_rows` rows of `max_context` tokens, a bucket a power of two."""
    buckets = tuple(1 << power for power in range(max_rows.bit_length()))
    if buckets[-1] != max_rows:
        raise ValueError(f"found {max_rows} rows, wanted a power of two")
    return Limits(
        block_size=16,
        max_rows=max_rows,
        max_step_tokens=2 * max_rows,
        max_context=max_context,
        kv_tokens=max_rows * max_context,
        row_buckets=buckets,
        token_buckets=(*buckets, 2 * max_rows),
    )


def build_null_bundle(folder: Path, limits: Limits) -> Path:
    """An `rtx` bundle of a random model of two layers, made without a compiler."""
    tiny_bundle(folder, "rtx", overrides={"max_position_embeddings": limits.max_context}, limits=limits)
    return folder / "bundle"


@contextmanager
def null_desk(bundle: Path) -> Iterator[tuple[SimDesk, TimedDriver]]:
    """Scheduler, packer, loop and executor over such a device, all graphs captured."""
    rank = simulated(bundle)
    _empty(rank)
    driver = TimedDriver(rank.driver)
    desk = open_desk(rank, is_strict=True, libraries=replace(rank.libraries(), driver=driver))
    _empty_graphs(rank.driver)
    packer = Packer(desk.limits, rank.bundle.manifest.sizes.vocab_size, desk.executor.rules)
    scheduler = Scheduler(desk.limits, Pages(desk.limits), desk.executor.rules)
    desk.loop = Loop(scheduler, packer, desk.executor, clock=driver.host_clock)
    thresholds = gc.get_threshold()
    settle_garbage()  # as a server does
    try:
        yield desk, driver
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        desk.executor.close()


def _empty(rank: SimulatedRank) -> None:
    """Take the work out of kernels and engines, but for the kernel that writes the tokens."""
    for name, kernel in rank.driver.kernels.by_name.items():
        kernel.body = _draw if name.startswith("draw_tokens") else _nothing
    folder = rank.bundle.rank_dir(0)
    for info in rank.bundle.manifest.engines[0]:
        image = (folder / info.file).read_bytes()
        spec = rank.tensorrt.spec(image)
        assert spec is not None
        rank.tensorrt.register(image, replace(spec, compute=_nothing))


def _empty_graphs(driver: SimDriver) -> None:
    """Leave of every graph what writes the tokens: walking through the rest would drive the host out of its caches,
    as no device does.
    """
    for (kind, _), thing in driver.live.items():
        if kind == "ready graph":
            thing.nodes = tuple(node for node in thing.nodes if node.what.startswith("draw_tokens"))


def _draw(memory: DeviceMemory, grid: Grid, pointers: tuple[int, ...]) -> None:
    memory.view(pointers[-1], "int32", (grid[0],), "tokens")[:] = TOKEN


def _nothing(*arguments: Any) -> None:
    pass

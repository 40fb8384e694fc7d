"""A rank's links over NCCL's bindings: signatures as they are, sums between ranks, errors in one line, abort."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cuda.bindings.driver import CUresult as Status
from nccl.bindings import nccl as real
from numpy.typing import NDArray

from ostinato.engines.errors import DeviceError
from ostinato.engines.shards import Shards
from ostinato.runtime.capture import capture
from ostinato.runtime.cuda import Device, DeviceBuffer, Stream
from ostinato.runtime.nccl import NcclLinks, unique_ids

from ..sim.driver import SimDriver
from ..sim.nccl import SimNccl

CALLS = (
    "get_unique_id", "get_error_string", "comm_init_rank_config", "comm_get_async_error", "comm_abort",
    "comm_destroy", "all_reduce", "all_gather", "send", "recv",
)  # fmt: skip
COUNT = 6


class Rank:
    """A device, its links, and what an executor would have of memory and streams."""

    def __init__(self, number: int, shards: Shards, ids: Any, go_on: Callable[[], None]) -> None:
        self.driver = SimDriver(num_devices=shards.num_ranks)
        clock = self.driver.clock
        self.device = Device(number, self.driver, clock=clock.now, sleep=clock.sleep)
        own = Device(number, self.driver, clock=clock.now, sleep=clock.sleep)
        self.nccl = SimNccl(self.driver, limit_s=20.0)
        self.links = NcclLinks.connect(self.nccl, own, shards.shard(number), ids, go_on)
        self.device.make_current()
        self.stream: Stream = self.device.stream()
        self.source, self.target = (self.device.allocate(4 * COUNT * shards.num_ranks, "numbers") for _ in range(2))

    def put(self, numbers: NDArray[Any]) -> None:
        self.view(self.source, numbers.dtype)[: len(numbers)] = numbers

    def view(self, buffer: DeviceBuffer, dtype: Any) -> NDArray[Any]:
        return self.driver.memory.bytes_at(buffer.address, buffer.num_bytes, "test").view(dtype)

    def finish(self) -> NDArray[np.float32]:
        self.stream.wait("the test's work")
        return self.view(self.target, np.float32)

    def close(self) -> None:
        self.device.close()
        self.links.close()
        assert self.driver.alive() == []


@contextmanager
def ranks(shards: Shards) -> Iterator[Callable[[Callable[[Rank], Any]], list[Any]]]:
    """Gives a function that lets every rank do something at the same time, each on a thread of its own."""
    ids = unique_ids(SimNccl(SimDriver()), shards)
    pools = [ThreadPoolExecutor(1) for _ in range(shards.num_ranks)]

    def everyone(do: Callable[..., Any], *of: Any) -> list[Any]:
        each = [pool.submit(do, *(one[rank] for one in of)) for rank, pool in enumerate(pools)]
        return [one.result(timeout=30) for one in each]

    made = everyone(lambda number: Rank(number, shards, ids, lambda: None), range(shards.num_ranks))
    try:
        yield lambda do: everyone(do, made)
    finally:
        everyone(Rank.close, made)
        for pool in pools:
            pool.shutdown()


def numbers_of(rank: Rank) -> NDArray[np.float32]:
    return np.random.default_rng(rank.links._shard.rank).normal(size=COUNT).astype(np.float32)


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_those_of_the_bindings(name: str) -> None:
    """The bindings write their signature into the docstring; types stand before the names, in C's way."""
    signature = re.match(rf"{name}\((.*?)\)", getattr(real, name).__doc__)
    assert signature is not None
    wanted = [one.split()[-1] for one in signature[1].split(",") if one.strip()]
    code = getattr(SimNccl, name).__code__
    assert list(code.co_varnames[1 : code.co_argcount]) == wanted


def test_slices_sum_and_gather_the_same_everywhere() -> None:
    def work(rank: Rank) -> tuple[bytes, bytes]:
        rank.put(numbers_of(rank))
        rank.links.all_reduce(rank.source.address, rank.target.address, COUNT, "float32", rank.stream)
        total = rank.finish()[:COUNT].tobytes()
        rank.links.all_gather(rank.source.address, rank.target.address, COUNT, "float32", rank.stream)
        return total, rank.finish()[: 3 * COUNT].tobytes()

    with ranks(Shards(3, 1)) as everyone:
        parts = np.stack(everyone(numbers_of))
        assert everyone(work) == [(parts.sum(0, dtype=np.float32).tobytes(), parts.tobytes())] * 3
        assert all(everyone(lambda rank: rank.links.communicator > 0))
        assert everyone(lambda rank: rank.links.error()) == [None] * 3


def test_stages_hand_over_to_the_same_slice_of_the_next() -> None:
    def work(rank: Rank) -> list[float]:
        shard = rank.links._shard
        rank.put(np.full(COUNT, 100 + shard.rank, np.float32))
        rank.view(rank.target, np.float32)[:] = 0
        if not shard.is_first_stage:
            rank.links.receive(rank.target.address, COUNT, "float32", rank.stream)
        if not shard.is_last_stage:
            rank.links.send(rank.source.address, COUNT, "float32", rank.stream)
        return [float(number) for number in rank.finish()[:1]]

    with ranks(Shards(2, 2)) as everyone:
        assert everyone(work) == [[0], [0], [100], [101]]


def test_captured_graph_sums_anew_at_each_launch() -> None:
    def work(rank: Rank) -> list[float]:
        place = rank.source.address
        rank.put(np.ones(COUNT, np.float32))
        graph = capture(rank.stream, lambda stream: rank.links.all_reduce(place, place, COUNT, "float32", stream), "it")
        assert rank.view(rank.source, np.float32)[0] == 1  # nothing has run
        for _ in range(3):
            graph.launch(rank.stream)
        rank.finish()
        return [float(number) for number in rank.view(rank.source, np.float32)[:COUNT]]

    with ranks(Shards(2, 1)) as everyone:
        assert everyone(work) == [[8.0] * COUNT] * 2


def test_abort_ends_what_waits_for_a_peer() -> None:
    def work(rank: Rank) -> str:
        if rank.links._shard.rank:
            return ""
        rank.links.all_reduce(rank.source.address, rank.target.address, COUNT, "float32", rank.stream)
        threading.Timer(0.1, rank.links.abort).start()
        rank.finish()
        with pytest.raises(DeviceError) as refused:
            rank.links.all_reduce(rank.source.address, rank.target.address, COUNT, "float32", rank.stream)
        return str(refused.value)

    with ranks(Shards(2, 1)) as everyone:
        first, _ = everyone(work)
        assert first == "can't sum over the slices: the ranks were disconnected; restart the server"


def test_refused_launch_is_an_error_in_one_line() -> None:
    def work(rank: Rank) -> str:
        rank.driver.faults.calls["all_reduce"] = rank.driver.faults.calls["AllReduce"] = (
            Status.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        )
        with pytest.raises(DeviceError) as refused:
            rank.links.all_reduce(rank.source.address, rank.target.address, COUNT, "float32", rank.stream)
        return str(refused.value)

    with ranks(Shards(2, 1)) as everyone:
        assert (
            everyone(work)
            == [
                "can't sum over the slices: UnhandledCudaError (1): simulated: see nvidia-smi, and NCCL_DEBUG=INFO for "
                "what NCCL says"
            ]
            * 2
        )


def test_connecting_is_given_up_when_a_peer_will_not_come() -> None:
    def give_up() -> None:
        raise DeviceError("rank 1 is gone")

    shards = Shards(2, 1)
    with pytest.raises(DeviceError, match="rank 1 is gone"):
        Rank(0, shards, unique_ids(SimNccl(SimDriver()), shards), give_up)


def test_missing_library_is_an_error_in_one_line() -> None:
    """The bindings load NCCL when it is first needed."""

    class Bare:
        def get_unique_id(self) -> None:
            raise RuntimeError('Failure finding "libnccl.so.2": No such file: libnccl.so.2\n')

    with pytest.raises(DeviceError) as refused:
        unique_ids(Bare(), Shards(2, 1))
    assert str(refused.value) == (
        'can\'t make a unique id: Failure finding "libnccl.so.2": No such file: libnccl.so.2: install ostinato[ranks]'
    )

"""One rank of a model, in whichever process: what it is made of, and the memory that it shares (once at start)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ostinato.engines.bundle import Bundle
from ostinato.engines.errors import OstinatoError
from ostinato.engines.shards import Shard, Shards
from ostinato.engines.sizes import Limits

from .batch_bytes import max_batch_words, max_sampled_words
from .cuda import Device
from .cuda_executor import CudaExecutor
from .executor import Executor
from .libraries import Libraries
from .nccl import NcclLinks, UniqueIds, nccl_bindings
from .progress import Show
from .shared_ring import GoOn, Ring, RingShape, map_memory

STEP, MASKS, WAIT, CLOSE, RESULT = range(1, 6)  # kinds of messages: rank 0's calls, and what a step gives


def real_libraries(setup: RankSetup) -> Libraries:
    return Libraries()


def cuda_executor(setup: RankSetup, libraries: Libraries, links: NcclLinks, progress: Show) -> Executor:
    return CudaExecutor(
        setup.bundle,
        setup.limits,
        rank=setup.rank,
        libraries=libraries,
        links=links,
        is_strict=setup.is_strict,
        progress=progress,
    )


@dataclass(frozen=True)
class RankParts:
    """What makes a rank's parts in its own process; functions of a module, since they travel by name.

    `libraries`: (setup, *arguments) → Libraries.
    """

    libraries: Callable[..., Libraries] = real_libraries
    executor: Callable[[RankSetup, Libraries, NcclLinks, Show], Executor] = cuda_executor
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class RankSetup:
    """All that a process must know to be a rank; it travels pickled. `ids`: where the communicators meet."""

    bundle: Bundle
    limits: Limits
    rank: int
    parts: RankParts
    is_strict: bool
    ids: UniqueIds

    @property
    def shards(self) -> Shards:
        return self.bundle.manifest.shards

    @property
    def shard(self) -> Shard:
        return self.shards.shard(self.rank)

    @property
    def hands_back(self) -> bool:
        """Whether rank 0, which is of another stage, gets a step's result from this rank."""
        return self.rank > 0 and self.shard.is_last_stage and not self.shard.tp_rank

    def libraries(self) -> Libraries:
        return self.parts.libraries(self, *self.parts.arguments)

    def connect(self, libraries: Libraries, go_on: GoOn) -> NcclLinks:
        """Meet the other ranks on this rank's GPU, which has its number among those that CUDA shows."""
        device = Device(self.rank, libraries.driver, clock=libraries.clock, sleep=libraries.sleep)
        try:
            nccl = nccl_bindings() if libraries.nccl is None else libraries.nccl
        except OstinatoError:
            device.close()
            raise
        return NcclLinks.connect(nccl, device, self.shard, self.ids, go_on)

    def executor(self, libraries: Libraries, links: NcclLinks, progress: Show) -> Executor:
        return self.parts.executor(self, libraries, links, progress)


@dataclass(frozen=True)
class Rings:
    """`steps`: from rank 0 to every other, rank r is reader r - 1. `results`: from the last stage to rank 0."""

    steps: Ring
    results: Ring | None

    @classmethod
    def at(cls, descriptor: int, bundle: Bundle, limits: Limits) -> Rings:
        steps, results = ring_shapes(bundle, limits)
        memory = map_memory(descriptor)
        has_results = bundle.manifest.shards.pipeline_parallel > 1
        return cls(
            Ring(memory[: steps.num_bytes], steps),
            Ring(memory[steps.num_bytes :][: results.num_bytes], results) if has_results else None,
        )


def ring_shapes(bundle: Bundle, limits: Limits) -> tuple[RingShape, RingShape]:
    """Of steps and results: room for every message of the steps in flight, whatever they hold."""
    shards = bundle.manifest.shards
    in_flight = num_in_flight(shards)
    words = max_batch_words(limits, bundle.manifest.sizes.vocab_size)
    return RingShape(shards.num_ranks - 1, 3 * in_flight + 1, words), RingShape(1, in_flight, max_sampled_words(limits))


def num_in_flight(shards: Shards) -> int:
    """Steps at once: one runs and one is launched, or one in every stage."""
    return max(2, shards.pipeline_parallel)

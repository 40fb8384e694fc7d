"""A whole desk over a bundle on the simulated device: requests in, tokens out, and the device to look into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import I32
from ostinato.runtime.batch import Packer
from ostinato.runtime.cuda_executor import CudaExecutor
from ostinato.runtime.libraries import Libraries
from ostinato.runtime.loop import Loop
from ostinato.runtime.pages import Pages
from ostinato.runtime.request import Event, Request, SamplingParams
from ostinato.runtime.scheduler import Scheduler
from tests.guides import Endless
from tests.sim.sim_bundle import SimulatedRank


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


class Parity(Endless):
    """A guide that allows only tokens of the parity of their place in the output."""

    def __init__(self) -> None:
        self._place = 0

    def fill_mask(self, words: I32) -> None:
        words[:] = np.uint32(0x55555555 << self._place % 2).view(np.int32)

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == self._place % 2
        self._place += 1


@dataclass
class SimDesk:
    """A loop over the executor of one simulated GPU."""

    rank: SimulatedRank
    limits: Limits
    executor: CudaExecutor
    loop: Loop

    def requests(self, prompts: Sequence[Sequence[int]], params: SamplingParams, first_id: int = 0) -> list[Request]:
        return [
            Request(first_id + place, list(prompt), len(prompt), params, params.max_tokens or 8, seed=100 + place)
            for place, prompt in enumerate(prompts)
        ]

    def run(self, requests: Sequence[Request]) -> list[Event]:
        """Every event until all have ended."""
        for request in requests:
            self.loop.submit(request)
        return [event for events in self.loop.run_until_idle() for event in events]

    def tokens(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """The output of each prompt."""
        requests = self.requests(prompts, params)
        failed = [event.error for event in self.run(requests) if event.error is not None]
        assert not failed, failed
        return [request.tokens[request.num_prompt :] for request in requests]


def open_desk(
    rank: SimulatedRank,
    *,
    limits: Limits | None = None,
    is_strict: bool = False,
    libraries: Libraries | None = None,
) -> SimDesk:
    """To be closed by its executor's `close`."""
    limits = limits or rank.bundle.manifest.limits
    executor = CudaExecutor(
        rank.bundle, limits, libraries=libraries or rank.libraries(), is_strict=is_strict, progress=silent
    )
    pages = Pages(limits, prefix_caching=False)
    packer = Packer(limits, rank.bundle.manifest.sizes.vocab_size, executor.rules)
    return SimDesk(rank, limits, executor, Loop(Scheduler(limits, pages, executor.rules), packer, executor))


@contextmanager
def sim_desk(rank: SimulatedRank, *, limits: Limits | None = None) -> Iterator[SimDesk]:
    """Closed at the end, and then nothing of the device may be left."""
    desk = open_desk(rank, limits=limits)
    try:
        yield desk
    finally:
        desk.executor.close()
    assert rank.driver.alive() == []

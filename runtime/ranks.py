"""Several GPUs as one executor: a process a rank, of which rank 0 is this one (made at start, run per step).

loop ─▶ rank 0 ──── ring of messages ────▶ rank 1 … n      every rank makes the same calls in the same order;
          ▲                                    │           sums, gathers and hand-overs go from GPU to GPU
          └──── results of the last stage ─────┘
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from ostinato.engines.bundle import Bundle
from ostinato.engines.errors import DeviceError, OstinatoError
from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import I32, Sampled

from .batch import Batch
from .batch_bytes import batch_bytes, sampled_from, table_bytes
from .executor import Executor, StepRules, Ticket
from .graphs import Coverage
from .libraries import Libraries
from .nccl import NcclLinks, nccl_bindings, unique_ids
from .progress import Show
from .rank import CLOSE, MASKS, STEP, WAIT, RankParts, RankSetup, Rings, num_in_flight, ring_shapes
from .rank_watch import STALL_S, RankWatch
from .shared_ring import RingReader, RingWriter, share_memory, wait_until


class RanksTicket:
    """A step in flight on all ranks."""

    def __init__(self, ranks: RanksExecutor, number: int, own: Ticket) -> None:
        self._ranks, self._number, self._own = ranks, number, own

    def sample(self, masks: I32) -> None:
        self._ranks.sample(self._number, self._own, masks)

    def wait(self) -> Sampled:
        return self._ranks.wait(self._number, self._own)


class RanksExecutor:
    """Runs a bundle of several ranks. When one fails, dies or stalls, all end, and `trouble` says which and why.

    Made and used by one thread at a time; `trouble` may be read from any. `stall_s`: how long a rank may take over a
    step, at most. Raises BundleError (bundle and machine do not fit) or DeviceError.
    """

    def __init__(
        self,
        bundle: Bundle,
        limits: Limits,
        *,
        parts: RankParts | None = None,
        is_strict: bool = False,
        stall_s: float = STALL_S,
        progress: Show,
    ) -> None:
        shards = bundle.manifest.shards
        assert shards.num_ranks > 1, "one rank needs no others"
        setup = RankSetup(bundle, limits, 0, parts or RankParts(), is_strict, {})
        libraries = setup.libraries()
        setup = replace(setup, ids=unique_ids(libraries.nccl or nccl_bindings(), shards))
        descriptor = share_memory(sum(shape.num_bytes for shape in ring_shapes(bundle, limits)))
        try:
            rings = Rings.at(descriptor, bundle, limits)
            self._steps = RingWriter(rings.steps)
            self._results = None if rings.results is None else RingReader(rings.results, 0)
            self._show_lock = threading.Lock()
            setups = [replace(setup, rank=rank) for rank in range(1, shards.num_ranks)]
            self._watch = RankWatch(setups, descriptor, self._steps, self._one_at_a_time(progress), stall_s)
            self._number, self._is_closed = 0, False
            self._links: NcclLinks | None = None
            self._own: Executor | None = None
            self._open(setup, libraries, self._one_at_a_time(progress))
        finally:
            os.close(descriptor)

    @property
    def pids(self) -> tuple[int, ...]:
        """The other ranks' processes."""
        return self._watch.pids

    @property
    def rules(self) -> StepRules:
        assert self._own is not None
        return self._own.rules

    @property
    def trouble(self) -> str | None:
        error = self._watch.error
        return str(error) if error is not None else self._own.trouble if self._own is not None else None

    @property
    def coverage(self) -> Coverage | None:
        """What rank 0 replayed; the others replay the same."""
        return None if self._own is None else self._own.coverage

    def run(self, batch: Batch) -> RanksTicket:
        assert self._own is not None
        self._watch.raise_error()
        content = batch_bytes(batch)
        with self._together():
            number, self._number = self._number, self._number + 1
            self._steps.put(STEP, number, content, self._watch.raise_error)
            return RanksTicket(self, number, self._own.run(batch))

    def sample(self, number: int, own: Ticket, masks: I32) -> None:
        with self._together():
            self._steps.put(MASKS, number, table_bytes(masks), self._watch.raise_error)
            own.sample(masks)

    def wait(self, number: int, own: Ticket) -> Sampled:
        """Ctrl-C while this waits does no harm: all ranks end the step, whoever takes what it gives."""
        with self._together():
            self._steps.put(WAIT, number, b"", self._watch.raise_error)
        try:
            sampled = own.wait()
        except Exception as error:
            raise self._watch.failed(error) from error
        if self._results is not None:
            sampled = self._result(self._results, number)
        self._watch.raise_error()  # what an aborted sum gave counts for nothing
        return sampled

    def _result(self, results: RingReader, number: int) -> Sampled:
        """Of this step; what nobody took before is passed over."""
        while True:
            message = results.take(self._watch.raise_error)
            assert message.number <= number, f"the result of step {message.number} comes before that of {number}"
            found = sampled_from(message.words) if message.number == number else None
            results.let_go()
            if found is not None:
                return found

    def close(self) -> None:
        """End every rank; again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        is_orderly = self._watch.error is None
        try:
            if is_orderly:
                self._steps.put(CLOSE, 0, b"", self._watch.raise_error)
                self._watch.expect_end()
            self._close_own()
        except OstinatoError:
            if is_orderly:
                raise
        finally:
            self._watch.close(is_orderly=is_orderly)

    def _open(self, setup: RankSetup, libraries: Libraries, progress: Show) -> None:
        try:
            self._links = self._watch.links = setup.connect(libraries, self._watch.raise_error)
            self._own = setup.executor(libraries, self._links, progress)
            assert self._own.rules.num_in_flight <= num_in_flight(setup.shards), "the rings are too small"
            wait_until(self._watch.is_ready, self._watch.raise_error)
            self._watch.is_open = True
        except BaseException as error:
            failure = self._watch.failed(error) if isinstance(error, Exception) else error
            self._is_closed = True
            self._watch.close(is_orderly=False)
            with suppress(OstinatoError):
                self._close_own()
            raise failure from error

    def _close_own(self) -> None:
        if self._own is not None:
            self._own.close()
        if self._links is not None:
            self._links.close()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A call that only some ranks made, be it that Ctrl-C cut it short, ends all: each waits for the others."""
        try:
            yield
        except Exception as error:
            raise self._watch.failed(error) from error
        except BaseException:
            self._watch.failed(DeviceError("a step was interrupted: restart"))
            raise

    def _one_at_a_time(self, progress: Show) -> Show:
        """Ranks get ready at the same time, and one line is shown."""

        def show(what: str, done: int, total: int) -> None:
            with self._show_lock:
                progress(what, done, total)

        return show

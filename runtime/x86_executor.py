"""The executor of target `x86`: a bundle's own compiled decoder and sampler (made at start, run per step)."""

from __future__ import annotations

import numpy as np

from ostinato.engines.bundle import Bundle
from ostinato.engines.errors import OstinatoError
from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import F32, Sampled, SamplingRows

from .batch import Batch
from .executor import LogitsObserver, StepRules
from .host_ticket import HostTicket
from .progress import Show
from .x86_library import X86Decoder
from .x86_sampler import X86Sampler


class X86Executor:
    """Runs an `x86` bundle. Steps are ragged: nothing is padded, and a row's logits are the same bits in any step."""

    def __init__(
        self,
        bundle: Bundle,
        limits: Limits,
        *,
        num_threads: int,
        progress: Show,
        observe_logits: LogitsObserver | None = None,
    ) -> None:
        sizes = bundle.manifest.sizes
        self.rules = StepRules((0,) * (limits.max_rows + 1), samples_in_wait=True)
        self._observe_logits = observe_logits
        progress("open the decoder", 0, 1)
        self._decoder = X86Decoder(bundle.rank_dir(), sizes, limits, num_threads)
        progress("open the decoder", 1, 1)
        self._logits: F32 = np.empty((limits.max_rows, sizes.vocab_size), np.float32)
        try:
            self._sampler = X86Sampler(self._decoder.library, sizes.vocab_size, num_threads)
        except OstinatoError:
            self._decoder.close()
            raise

    coverage = None  # it replays nothing

    @property
    def trouble(self) -> None:
        """None ever: a step that is refused tells nothing of the next."""

    def run(self, batch: Batch) -> HostTicket:
        """Start a step on the decoder's threads and return at once. Raises DeviceError.

        The batch's arrays are read until it lands; nobody reuses them sooner, since one step is in flight.
        """
        arrays = (batch.input_ids, batch.query_starts, batch.context_lens, batch.block_tables, batch.logits_indices)
        self._decoder.start(arrays, self._logits)
        return HostTicket(self, batch)

    def finish(self, batch: Batch) -> Sampled:
        """Wait for the running step and sample its rows."""
        self._decoder.wait()
        logits = self._logits[: batch.num_sampled]
        if self._observe_logits is not None and batch.num_sampled:
            self._observe_logits(logits)
        assert isinstance(batch.sampling, SamplingRows), "the CPU keeps no state"
        return self._sampler.sample(logits, batch.sampling)

    def close(self) -> None:
        """End the decoder's threads and the sampler's; a step that runs is waited for."""
        self._decoder.close()
        self._sampler.close()

"""The executor of one GPU's rank: replays the bundle's program in CUDA graphs (made at start, run per step).

    stream        state lines, inputs ↑ │ feed, forward ────────────── │ sampling │ tokens ↓
    side stream                         └ masks that come late ↑ ──────┘

All of a step is on one stream, in order, so steps follow each other without the host. Only masks that come late go up
beside it: after what reads the masks' memory before, and before the sampling that reads them.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import numpy as np

from ostinato.engines.bundle import Bundle
from ostinato.engines.errors import DeviceError
from ostinato.engines.program import StepShape
from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import F32, I32, Sampled

from .batch import Batch
from .buffers import Arrays, StepSlot
from .device_rows import DeviceRows, StateLine
from .executor import StepRules
from .gpu_rank import GpuRank
from .graphs import Coverage
from .libraries import REAL, Libraries
from .links import Links
from .progress import Show
from .step_inputs import StepInputs

_DRAIN_S = 5.0  # after a failure; what takes longer hangs

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CudaTicket:
    """A step in flight on the GPU; `num_masks` lines of masks went up with it."""

    executor: CudaExecutor
    slot: StepSlot
    inputs: StepInputs
    shape: StepShape
    num_tokens: int
    num_sampled: int
    num_masks: int = 0
    is_whole: bool = False  # all of it is on the stream

    def sample(self, masks: I32) -> None:
        self.executor.sample(self, masks)

    def wait(self) -> Sampled:
        return self.executor.finish(self)


class CudaExecutor:
    """Runs one rank of a GPU bundle, on GPU number `rank`. Raises BundleError (it does not fit) or DeviceError.

    `links`: how the rank reaches the others, where there are several. `is_strict`: refuse decode steps that are not
    captured. A rank that is not of the last stage samples nothing: its tickets give no lines.
    After a DeviceError the device is idle and the executor goes on, unless `trouble` says otherwise.
    """

    def __init__(
        self,
        bundle: Bundle,
        limits: Limits,
        *,
        rank: int = 0,
        libraries: Libraries = REAL,
        links: Links | None = None,
        is_strict: bool = False,
        progress: Show,
    ) -> None:
        self._vocab_size = bundle.manifest.sizes.vocab_size
        self._rank = GpuRank(bundle, limits, rank, libraries, links, is_strict, progress)
        *self._early_parts, self._last_part = self._rank.program.parts
        self._samples = "tokens" in self._rank.buffers.layout.outputs[self._rank.shapes.needed[0].key].places
        self._entered = threading.local()  # not a set of thread numbers, which are given again
        self._trouble: str | None = None
        self._next_slot = 0

    @property
    def rules(self) -> StepRules:
        return self._rank.rules

    @property
    def trouble(self) -> str | None:
        return self._trouble

    @property
    def coverage(self) -> Coverage:
        """What was replayed so far, and what the graphs take."""
        return self._rank.graphs.coverage

    def run(self, batch: Batch) -> CudaTicket:
        """Launch a step; of one with late masks, what comes before sampling. Raises DeviceError."""
        self._enter()
        shape = self._rank.shapes.of(batch)
        slot, inputs = self._rank.buffers.slots[self._next_slot], self._rank.inputs[self._next_slot][shape]
        ticket = CudaTicket(self, slot, inputs, shape, batch.num_tokens, batch.num_sampled)
        try:
            self._launch(ticket, batch)
        except BaseException as error:
            self._mend(error)
            raise
        self._next_slot = (self._next_slot + 1) % len(self._rank.inputs)
        return ticket

    def sample(self, ticket: CudaTicket, masks: I32) -> None:
        """Send the masks up beside what runs, and launch the rest of the step. Raises DeviceError."""
        assert not ticket.is_whole, "masks come once, and only where the batch has late ones"
        self._enter()
        rank = self._rank
        try:
            ticket.inputs.add_masks(ticket.num_masks, masks)
            rank.side_stream.after(rank.masks_may_go_up)
            ticket.slot.upload_masks(rank.side_stream, ticket.shape, ticket.num_masks, len(masks))
            rank.side_stream.record(rank.masks_are_up)
            rank.stream.after(rank.masks_are_up)
            self._complete(ticket)
        except BaseException as error:
            self._mend(error)
            raise

    def finish(self, ticket: CudaTicket) -> Sampled:
        """Wait for a step; the result is the caller's own. Raises DeviceError."""
        assert ticket.is_whole, "the step waits for masks"
        self._enter()
        try:
            outputs = ticket.slot.wait(ticket.shape)
            return self._sampled(outputs, ticket.num_sampled) if self._samples else _NOTHING
        except BaseException as error:
            self._mend(error)
            raise

    def _launch(self, ticket: CudaTicket, batch: Batch) -> None:
        rank, slot, shape, stream = self._rank, ticket.slot, ticket.shape, self._rank.stream
        sampling = batch.sampling
        assert isinstance(sampling, DeviceRows), "this executor keeps the state of sampling"
        slot.fill(shape)
        ticket.num_masks = ticket.inputs.fill(batch, sampling)
        for line in sampling.joined if self._samples else ():
            rank.lines.write(stream, line.line, _written(line))
        slot.upload(stream, shape, ticket.num_masks)
        has_late = sampling.num_late_masks > 0
        if has_late:
            stream.record(rank.masks_may_go_up)
        rank.program.receive(shape, stream)
        for part in self._early_parts:
            rank.graphs.run(shape, ticket.num_tokens, part)
        if not has_late:
            self._complete(ticket)

    def _complete(self, ticket: CudaTicket) -> None:
        """The step's last part, and what comes back."""
        rank = self._rank
        rank.graphs.run(ticket.shape, ticket.num_tokens, self._last_part)
        rank.program.send(ticket.shape, rank.stream)
        ticket.slot.download(rank.stream, ticket.shape)
        ticket.is_whole = True

    def _sampled(self, outputs: Arrays, count: int) -> Sampled:
        tokens = outputs["tokens"][:count].copy()
        if count and tokens.view(np.uint32).max() >= self._vocab_size:  # maybe -1, which tells of no legal token
            self._check_tokens(tokens)
        return Sampled(
            tokens,
            outputs["logprobs"][:count].copy(),
            outputs["top_ids"][:count].copy(),
            outputs["top_logprobs"][:count].copy(),
        )

    def _check_tokens(self, tokens: I32) -> None:
        wrong = (tokens < -1) | (tokens >= self._vocab_size)
        if wrong.any():  # what no kernel has written, or from logits that are no numbers
            raise DeviceError(
                f"the GPU sampled token {tokens[wrong][0]}, wanted are -1 to {self._vocab_size - 1}: the step did not "
                "run as it should; restart the server, and see that the bundle fits this machine (ostinato inspect)"
            )

    def _enter(self) -> None:
        """Once per call: a device is current by thread, and one that is lost is not asked again."""
        if self._trouble is not None:
            raise DeviceError(self._trouble)
        if not hasattr(self._entered, "once"):
            self._rank.device.make_current()
            self._entered.once = True

    def _mend(self, error: BaseException) -> None:
        """Wait until the device is idle: then buffers may be used again, whatever was under way."""
        try:
            self._rank.device.drain(_DRAIN_S)
            is_lost = self._rank.device.is_lost()
        except DeviceError as hung:
            self._trouble = str(hung)
        else:
            self._trouble = str(error) if is_lost else None

    def close(self) -> None:
        """Report what was replayed, and give everything back. Raises DeviceError, unless there was trouble before."""
        for line in self.coverage.lines():
            logger.info("graphs: %s", line)
        try:
            self._rank.close(_DRAIN_S)
        except DeviceError as error:
            if self._trouble is None:
                raise
            logger.warning("the GPU was not given back, which the end of this process does: %s", error)


_NOTHING = Sampled(
    np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
)


def _written(line: StateLine) -> dict[str, I32 | F32]:
    """What of a line is to be written, by the state's names."""
    values = {"bias_ids": line.bias_ids, "bias_values": line.bias_values, "counts": line.counts}
    return {name: array for name, array in values.items() if array is not None}

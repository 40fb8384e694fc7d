"""Fills what a step need not write, and what steps before it left, with what shows when it is read (in tests)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.program import StepShape
from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import I32
from ostinato.runtime.batch import Batch
from ostinato.runtime.buffers import StepSlot
from ostinato.runtime.cuda import Stream
from ostinato.runtime.device_rows import DeviceRows
from ostinato.runtime.step_inputs import _SAMPLED, StepInputs
from tests.proof.tiny_proof import Machine
from tests.sim.memory import poison

_WITHIN_A_STEP = ("input", "cut", "scratch")


def poison_machine(machine: Machine, limits: Limits) -> None:
    """Now the caches and what state lines may hold; with every step its inputs' pads and all that passes within it."""
    rank = machine.executor._rank
    memory, layout = machine.rank.driver.memory, rank.buffers.layout
    for kind, names in (("cache", set(layout.blocks["cache"].places)), ("state", {"counts", "bias_values"})):
        for name in names & layout.blocks[kind].places.keys():
            place = layout.blocks[kind].places[name]
            poison(memory.bytes_at(rank.buffers.address(kind) + place.offset, place.num_bytes, "the test"))
    for number, slot in enumerate(rank.buffers.slots):
        inputs: dict[StepShape, Any] = rank.inputs[number]
        for shape, plain in inputs.items():
            inputs[shape] = PoisonedInputs(plain, slot._inputs[shape.key], limits)
        slot.upload = partial(_upload, machine, slot)  # type: ignore[method-assign]


class PoisonedInputs:
    """In place of a slot's inputs of one shape: garbage first, and afterwards where pads may be anything."""

    def __init__(self, inputs: StepInputs, arrays: Mapping[str, NDArray[Any]], limits: Limits) -> None:
        self._inputs, self._arrays, self._limits = inputs, arrays, limits

    def fill(self, batch: Batch, sampling: DeviceRows) -> int:
        arrays, limits, num_tokens = self._arrays, self._limits, batch.num_tokens
        for array in arrays.values():
            poison(array.reshape(-1).view(np.uint8))
        num_masks = self._inputs.fill(batch, sampling)
        num_blocks = -(-(batch.context_lens + np.diff(batch.query_starts)) // limits.block_size)
        unused = np.arange(arrays["block_tables"].shape[1]) >= np.pad(num_blocks, (0, _pads(arrays, batch)))[:, None]
        arrays["block_tables"][unused] = -1
        arrays["input_ids"][num_tokens:] = 7
        arrays["positions"][num_tokens:] = limits.max_context - 1
        arrays["slot_mapping"][num_tokens:] = limits.num_blocks * limits.block_size - 1  # of the last block
        arrays["logits_indices"][batch.num_sampled :] = len(arrays["input_ids"]) - 1
        for name in _SAMPLED:
            poison(arrays[name][batch.num_sampled :].view(np.uint8))
        return num_masks

    def add_masks(self, first: int, masks: I32) -> int:
        return self._inputs.add_masks(first, masks)


def _pads(arrays: Mapping[str, NDArray[Any]], batch: Batch) -> int:
    return len(arrays["block_tables"]) - batch.num_rows


def _upload(machine: Machine, slot: StepSlot, stream: Stream, shape: StepShape, mask_lines: int = 0) -> None:
    """In place of a slot's `upload`: on the stream, before it, nothing of the step before is left but its tokens."""
    driver, buffers = machine.rank.driver, machine.executor._rank.buffers
    table, tokens = buffers.table, buffers.layout.outputs[shape.key].places["tokens"]
    longest = max(layout.places["tokens"].end for layout in buffers.layout.outputs.values())
    assert tokens.offset == 0, "what feeds a step is not first"
    spans = [(buffers.address(kind), table[kind]) for kind in _WITHIN_A_STEP if kind in table]
    spans.append((buffers.address("output") + longest, table["output"] - longest))

    def spoil() -> None:
        for address, num_bytes in spans:
            poison(driver.memory.bytes_at(address, num_bytes, "the test"))

    with driver.lock:
        driver.enqueue(stream.raw, "poison", spoil)
    StepSlot.upload(slot, stream, shape, mask_lines)

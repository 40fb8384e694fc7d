"""All device memory of a rank, allocated once, and what a step in flight has of pinned memory (made at start).

One block a kind. `slots` are as many as steps in flight: a step fills a slot's inputs, sends them up in one copy, and
its results come down into the slot in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.io_table import BIAS_PAD
from ostinato.engines.memory_table import MemoryTable
from ostinato.engines.program import StepShape

from .cuda import WAIT_LIMIT_S, Device, DeviceBuffer, Handle, Stream
from .step_layout import BY_SHAPE, MASKS, ONE_ADDRESS, Layout, StepLayout, aligned

BIAS_IDS = "bias_ids"
Arrays = dict[str, NDArray[Any]]
H = TypeVar("H", bound=Handle)


class StepBuffers:
    """A rank's memory. `engine_bytes`: of the block that all engine segments share. Raises DeviceError.

    Contents are undefined until `clear`, and weights until they are uploaded.
    """

    def __init__(self, device: Device, layout: StepLayout, *, engine_bytes: int = 0, num_slots: int = 2) -> None:
        self.layout = layout
        wanted = {kind: layout.num_bytes(kind) for kind in (*ONE_ADDRESS, *BY_SHAPE)} | {"engine": engine_bytes}
        self._blocks: dict[str, DeviceBuffer] = {}
        self.slots: list[StepSlot] = []
        try:
            for kind in sorted(wanted, key=lambda kind: -wanted[kind]):  # what may not fit is tried first
                if wanted[kind]:
                    self._blocks[kind] = device.allocate(wanted[kind], f"{kind} buffers")
            for _ in range(num_slots):
                self.slots.append(StepSlot(self, device))
        except BaseException:
            self.close()
            raise
        fixed = {
            name: self.address(kind) + place.offset
            for kind in ONE_ADDRESS
            for name, place in layout.blocks[kind].places.items()
        }
        self._addresses = {
            key: fixed | self._places("input", layout.inputs[key]) | self._places("output", layout.outputs[key])
            for key in layout.inputs
        }

    def addresses(self, shape: StepShape) -> Mapping[str, int]:
        """Every buffer's device address in a step of this shape."""
        return self._addresses[shape.key]

    def address(self, kind: str) -> int:
        """Where a kind's block begins; 0 if the program has none of it."""
        return self._blocks[kind].address if kind in self._blocks else 0

    @property
    def table(self) -> Mapping[str, int]:
        """Bytes allocated by kind; "pinned" is host memory."""
        pinned = sum(slot.num_bytes for slot in self.slots)
        return {kind: block.num_bytes for kind, block in self._blocks.items()} | {"pinned": pinned}

    def beside(self, memory: MemoryTable) -> Mapping[str, tuple[int, int]]:
        """Kind → (bytes allocated, bytes that the bundle's plan has for it); "step" is all that passes within a step.

        Differences are each tensor's rounding to 256 bytes, and weights that lie inside engines.
        """
        table = self.table
        return {
            "weight": (table.get("weight", 0), memory.weight_bytes),
            "cache": (table.get("cache", 0), memory.num_blocks * memory.kv_bytes_per_block),
            "state": (table.get("state", 0), memory.state_bytes),
            "scratch": (table.get("scratch", 0), memory.scratch_bytes),
            "step": (
                sum(table.get(kind, 0) for kind in ("input", "output", "cut", "engine")),
                max(memory.activation_bytes.values(), default=0),
            ),
        }

    def clear(self, stream: Stream) -> None:
        """Empty caches and state, inputs without a live row or token, and zeros for them to be fed: to warm graphs."""
        for kind in ("cache", "state", "input", "output"):
            if kind in self._blocks:
                stream.fill(self._blocks[kind].address, 0, self._blocks[kind].num_bytes)
        if (bias_ids := self.layout.blocks["state"].places.get(BIAS_IDS)) is not None:
            stream.fill_words(self.address("state") + bias_ids.offset, BIAS_PAD, math.prod(bias_ids.shape))

    def close(self) -> None:
        """Give everything back; the device must be done with it."""
        while self.slots:
            self.slots[-1].close()
            self.slots.pop()
        for kind in list(self._blocks):
            self._blocks[kind].close()
            del self._blocks[kind]

    def _places(self, kind: str, layout: Layout) -> dict[str, int]:
        return {name: self.address(kind) + place.offset for name, place in layout.places.items()}


class StepSlot:
    """The host's side of one step in flight: `fill`, `upload`, what runs on the stream, `download`, `wait`, again.

    After a DeviceError `Device.drain` comes first: a copy may be under way that no event tells of.
    """

    def __init__(self, buffers: StepBuffers, device: Device) -> None:
        self._buffers = buffers
        layout = buffers.layout
        self._up_bytes = aligned(max(layout.uploads.values(), default=0))
        self.num_bytes = self._up_bytes + max(layout.downloads.values(), default=0)
        self._handles: list[Handle] = []
        try:
            self._up_is_done = self._keep(device.event())
            self._down_is_done = self._keep(device.event())
            self._pinned = self._keep(device.allocate_pinned(max(self.num_bytes, 1), "a step's inputs and outputs"))
        except BaseException:
            self.close()
            raise
        up, down = self._pinned.view[: self._up_bytes], self._pinned.view[self._up_bytes :]
        self._inputs = {key: views(up, layout.inputs[key], count) for key, count in layout.uploads.items()}
        self._up_counts = {key: layout.upload_bytes(key, 0) for key in layout.uploads}  # where no masks go up
        self._outputs = {key: views(down, layout.outputs[key], count) for key, count in layout.downloads.items()}

    def fill(self, shape: StepShape) -> Arrays:
        """The inputs of a step of this shape, to be written whole; waits until the last upload has been read."""
        self._up_is_done.wait("a step's upload")
        return self._inputs[shape.key]

    def plain(self, shape: StepShape) -> list[NDArray[np.uint8]]:
        """The same memory as bytes, but for masks and tables."""
        return [self._pinned.view[start:end] for start, end in self._buffers.layout.plain_spans(shape.key)]

    def upload(self, stream: Stream, shape: StepShape, mask_lines: int = 0) -> None:
        """One copy of all inputs, and of the first `mask_lines` masks."""
        key = shape.key
        count = self._buffers.layout.upload_bytes(key, mask_lines) if mask_lines else self._up_counts[key]
        if count:
            stream.upload(self._buffers.address("input"), self._pinned.address, count)
        stream.record(self._up_is_done)

    def upload_masks(self, stream: Stream, shape: StepShape, first: int, count: int) -> None:
        """`count` lines of masks alone, for a step whose other inputs have gone up before they were known."""
        place = self._buffers.layout.inputs[shape.key].places[MASKS]
        assert first + count <= place.shape[0], f"{first + count} mask lines in a step of {place.shape[0]} rows"
        line = place.num_bytes // place.shape[0]
        start = place.offset + first * line
        if count:
            stream.upload(self._buffers.address("input") + start, self._pinned.address + start, count * line)
        stream.record(self._up_is_done)

    def download(self, stream: Stream, shape: StepShape) -> None:
        """One copy of all outputs; `wait` returns when it has run."""
        count = self._buffers.layout.downloads[shape.key]
        if count:
            stream.download(self._pinned.address + self._up_bytes, self._buffers.address("output"), count)
        stream.record(self._down_is_done)

    def wait(self, shape: StepShape, limit_s: float = WAIT_LIMIT_S) -> Arrays:
        """Block until the step's outputs are here; they change with the slot's next step. Raises DeviceError."""
        self._down_is_done.wait(f"a step of {shape.key}", limit_s)
        return self._outputs[shape.key]

    def close(self) -> None:
        """Give it all back; the device must be done with it."""
        while self._handles:
            self._handles[-1].close()
            self._handles.pop()

    def _keep(self, handle: H) -> H:
        self._handles.append(handle)
        return handle


def views(block: NDArray[np.uint8], layout: Layout, num_bytes: int) -> Arrays:
    """The tensors that lie within the first `num_bytes`."""
    return {
        name: block[place.offset : place.end].view(place.dtype).reshape(place.shape)
        for name, place in layout.places.items()
        if place.end <= num_bytes
    }

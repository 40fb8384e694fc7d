"""Writes what sampling keeps of a request into its line on the device (when a request joins a step)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from .buffers import Arrays, StepBuffers, views
from .cuda import Device, Event, PinnedBuffer, Stream
from .step_layout import Layout, Place, aligned


class StateLines:
    """A ring of `num_staged` pinned lines, each with every state tensor; a line is used again once it has gone up.

    After a DeviceError `Device.drain` comes first: a copy may be under way that no event tells of.
    """

    def __init__(self, device: Device, buffers: StepBuffers, num_staged: int = 8) -> None:
        places = buffers.layout.blocks["state"].places
        offset, line = 0, {}
        for name, place in places.items():
            line[name] = Place(offset, place.dtype, place.shape[1:])
            offset = aligned(line[name].end)
        self._line = Layout(line)
        self._targets = {name: buffers.address("state") + place.offset for name, place in places.items()}
        self._next = 0
        self._events: list[Event] = []
        self._pinned: list[PinnedBuffer] = []
        self._staged: list[Arrays] = []
        try:
            for _ in range(num_staged):
                self._events.append(device.event())
                self._pinned.append(device.allocate_pinned(max(offset, 1), "a line of the sampling state"))
                self._staged.append(views(self._pinned[-1].view, self._line, offset))
        except BaseException:
            self.close()
            raise

    def write(self, stream: Stream, line: int, values: Mapping[str, NDArray[Any]]) -> None:
        """Some of the state tensors' line number `line`, from 1; arrays may be reused at once. Raises DeviceError."""
        assert line > 0, "line 0 is for pads"
        assert values.keys() <= self._line.places.keys(), f"a line has {', '.join(self._line.places)}"
        self._events[self._next].wait("a state line's upload")
        pinned, staged = self._pinned[self._next], self._staged[self._next]
        for name, array in values.items():
            place = self._line.places[name]
            staged[name][...] = array
            target = self._targets[name] + line * place.num_bytes
            stream.upload(target, pinned.address + place.offset, place.num_bytes)
        stream.record(self._events[self._next])
        self._next = (self._next + 1) % len(self._pinned)

    def close(self) -> None:
        """Give it all back; the device must be done with it."""
        for handles in (self._pinned, self._events):
            while handles:
                handles[-1].close()
                handles.pop()

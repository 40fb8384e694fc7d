"""Puts the calls of a rank's program on a stream, a part of a step at a time (at start, and where no graph is)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ostinato.engines.program import Buffer, Call, CollectiveCall, EngineCall, KernelCall, Program, StepShape
from ostinato.plugins.launcher import Launcher
from ostinato.plugins.stateful_sampling import STATEFUL_SAMPLING

from .buffers import StepBuffers
from .cuda import Stream
from .graphs import WHOLE_STEP
from .links import Links
from .trt import Engines

FORWARD, SAMPLING = "forward", "sampling"


def parts_of(program: Program) -> Mapping[str, tuple[Call, ...]]:
    """The program's calls by part: sampling is one of its own where it is kernels, so that it can wait for masks."""
    for place, call in enumerate(program.calls):
        if isinstance(call, KernelCall) and call.operator == STATEFUL_SAMPLING.name:
            return {FORWARD: program.calls[:place], SAMPLING: program.calls[place:]}
    return {WHOLE_STEP: program.calls}


def kernels_of(program: Program, shapes: Iterable[StepShape]) -> list[str]:
    """Every kernel that these steps launch, each once."""
    return sorted({one.kernel for table in program.launches.values() for shape in shapes for one in table[shape.key]})


class RankProgram:
    """A program over its buffers. `sizes`: step shape → what the symbols in shapes stand for in it."""

    def __init__(
        self,
        program: Program,
        buffers: StepBuffers,
        launcher: Launcher,
        engines: Engines | None,
        links: Links | None,
        sizes: Mapping[StepShape, Mapping[str, int]],
    ) -> None:
        self.parts = parts_of(program)
        self._launches = program.launches
        self._buffers, self._launcher, self._engines, self._links = buffers, launcher, engines, links
        self._sizes = sizes
        self._by_name = {buffer.name: buffer for buffer in program.buffers}

    def record(self, shape: StepShape, part: str, stream: Stream) -> None:
        """A part of a step of this shape. Raises DeviceError; then some of it may be on the stream."""
        addresses = self._buffers.addresses(shape)
        for call in self.parts[part]:
            if isinstance(call, EngineCall):
                assert self._engines is not None, f"{call.name} has no engine"
                bound = {tensor: addresses[name] for tensor, name in (*call.inputs.items(), *call.outputs.items())}
                self._engines.enqueue(call.engine, shape, bound, stream)
            elif isinstance(call, KernelCall):
                for launch in self._launches[call.operator][shape.key]:
                    pointers = [addresses[call.arguments[formal]] for formal in launch.arguments]
                    self._launcher.launch(launch.kernel, launch.grid, pointers, stream.address)
            else:
                self._meet(call, shape, addresses, stream)

    def receive(self, shape: StepShape, stream: Stream) -> None:
        """What the stage before gives, if there is one."""
        if (buffer := self._by_name.get("hidden_in")) is not None:
            address = self._buffers.addresses(shape)[buffer.name]
            self._reach().receive(address, self._count(buffer, shape), buffer.dtype, stream)

    def send(self, shape: StepShape, stream: Stream) -> None:
        """What the next stage takes, if there is one."""
        if (buffer := self._by_name.get("hidden_out")) is not None:
            address = self._buffers.addresses(shape)[buffer.name]
            self._reach().send(address, self._count(buffer, shape), buffer.dtype, stream)

    def _meet(self, call: CollectiveCall, shape: StepShape, addresses: Mapping[str, int], stream: Stream) -> None:
        source = self._by_name[call.source]
        links = self._reach()
        meet = links.all_reduce if call.operator == "AllReduce" else links.all_gather
        meet(addresses[call.source], addresses[call.target], self._count(source, shape), source.dtype, stream)

    def _count(self, buffer: Buffer, shape: StepShape) -> int:
        """Numbers that the buffer holds in such a step."""
        table = self._sizes[shape]
        return math.prod(size if isinstance(size, int) else table[size] for size in buffer.shape)

    def _reach(self) -> Links:
        assert self._links is not None, "a rank of several has links to the others"
        return self._links

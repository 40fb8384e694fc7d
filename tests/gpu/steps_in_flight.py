"""Runs steps on a rank of a test as an executor would: as many in flight as there are slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from numpy.typing import NDArray

from ostinato.engines.program import StepShape
from ostinato.runtime.buffers import StepBuffers
from ostinato.runtime.cuda import Device, Stream
from ostinato.runtime.graphs import Graphs
from ostinato.runtime.step_layout import StepLayout

Arrays = dict[str, NDArray[Any]]


class Step(Protocol):
    """`mask_lines`: of the masks, those that count."""

    @property
    def shape(self) -> StepShape: ...

    @property
    def inputs(self) -> Mapping[str, NDArray[Any]]: ...

    @property
    def live_tokens(self) -> int: ...

    @property
    def live_rows(self) -> int: ...

    @property
    def mask_lines(self) -> int: ...


S = TypeVar("S", bound=Step)


class StepsInFlight(Generic[S]):
    """`poisoned`: kinds of memory that only pass something within a step."""

    poisoned: ClassVar[tuple[str, ...]]
    layout: StepLayout
    device: Device
    stream: Stream
    buffers: StepBuffers
    graphs: Graphs

    def run(self, steps: Sequence[S]) -> list[Arrays]:
        """All of them; what a step before left in passing memory is poison."""
        count, results = len(self.buffers.slots), []
        for number in range(len(steps)):
            if number >= count:
                results.append(self.finish(steps, number - count))
            self.start(steps, number, poisons=True)
        return results + [self.finish(steps, number) for number in range(len(results), len(steps))]

    def start(self, steps: Sequence[S], number: int, *, poisons: bool = False) -> None:
        step, slot = steps[number], self.buffers.slots[number % len(self.buffers.slots)]
        for name, array in slot.fill(step.shape).items():
            array[...] = step.inputs[name]
        slot.upload(self.stream, step.shape, step.mask_lines)
        for kind in self.poisoned if poisons else ():
            self.stream.fill(self.buffers.address(kind), 0xFF, self.layout.num_bytes(kind))
        self.graphs.run(step.shape, step.live_tokens)
        slot.download(self.stream, step.shape)

    def finish(self, steps: Sequence[S], number: int) -> Arrays:
        step, slot = steps[number], self.buffers.slots[number % len(self.buffers.slots)]
        return {name: array[: step.live_rows].copy() for name, array in slot.wait(step.shape).items()}

    def close(self) -> None:
        self.device.close()


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""

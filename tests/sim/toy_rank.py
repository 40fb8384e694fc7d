"""The made-up rank on a simulated device: its memory, kernels, graphs and slots put together as an executor would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ostinato.engines.program import KernelCall, StepShape
from ostinato.plugins.cubin import Cubins
from ostinato.runtime.buffers import StepBuffers, StepSlot
from ostinato.runtime.cuda import Device, Stream
from ostinato.runtime.device_weights import upload_weights
from ostinato.runtime.graphs import Graphs
from ostinato.runtime.state_lines import StateLines
from ostinato.runtime.step_layout import StepLayout, step_layout

from .driver import SimDriver
from .toy import KERNELS, LIMITS, SHAPES, SIZES, Arrays, ToyStep, kernel_name, toy_program


class ToyRank:
    """The made-up rank on a simulated device, ready to run `shapes`. `captures`: False runs every step eagerly."""

    def __init__(
        self,
        driver: SimDriver,
        folder: Path,
        *,
        shapes: Sequence[StepShape] = SHAPES,
        captures: bool = True,
        is_strict: bool = False,
    ) -> None:
        self.driver, self.program = driver, toy_program()
        self.layout: StepLayout = step_layout(self.program, LIMITS, SIZES)
        self.device = Device(driver=driver, clock=driver.clock.now, sleep=driver.clock.sleep)
        self.cubins: Cubins | None = None
        try:
            self.open(folder, shapes, captures, is_strict)
        except BaseException:
            self.close()
            raise

    def open(self, folder: Path, shapes: Sequence[StepShape], captures: bool, is_strict: bool) -> None:
        self.stream = self.device.stream()
        self.buffers = StepBuffers(self.device, self.layout)
        self.fence()
        upload_weights(folder / "weights.bin", self.buffers, self.stream, _silent, chunk=500)
        self.buffers.clear(self.stream)
        self.lines = StateLines(self.device, self.buffers, 2)
        self.cubins = Cubins(folder, self.program.kernels, self.driver)
        self.cubins.prepare(kernel_name(name, shape) for shape in shapes for name in KERNELS)
        self.graphs = Graphs(self.stream, self.record, is_strict=is_strict)
        if captures:
            self.graphs.capture(shapes, _silent)
        self.stream.wait("getting ready")
        self.device.seal()

    def fence(self) -> None:
        """Let no kernel reach from one buffer into the next."""
        for key in self.layout.inputs:
            shape = next(shape for shape in SHAPES if shape.key == key)
            for layout in (self.layout.inputs[key], self.layout.outputs[key], *self.layout.blocks.values()):
                for name, place in layout.places.items():
                    self.driver.memory.fence(self.buffers.addresses(shape)[name], place.num_bytes)

    def record(self, shape: StepShape, part: str, stream: Stream) -> None:
        assert self.cubins is not None
        addresses = self.buffers.addresses(shape)
        (call,) = self.program.calls
        assert isinstance(call, KernelCall)
        for launch in self.program.launches["Toy"][shape.key]:
            pointers = [addresses[call.arguments[formal]] for formal in launch.arguments]
            self.cubins.launch(launch.kernel, launch.grid, pointers, stream.address)

    def start(self, slot: StepSlot, step: ToyStep) -> None:
        inputs = slot.fill(step.shape)
        assert inputs.keys() == step.inputs.keys()
        for name, array in step.inputs.items():
            inputs[name][...] = array
        slot.upload(self.stream, step.shape, step.mask_lines)
        self.graphs.run(step.shape, step.live_tokens)
        slot.download(self.stream, step.shape)

    def finish(self, slot: StepSlot, step: ToyStep) -> Arrays:
        return {name: array[: step.live_rows].copy() for name, array in slot.wait(step.shape).items()}

    def run(self, steps: Sequence[ToyStep]) -> list[Arrays]:
        """All of them, as many in flight as there are slots."""
        slots, results = self.buffers.slots, []
        for number, step in enumerate(steps):
            if number >= len(slots):
                results.append(self.finish(slots[number % len(slots)], steps[number - len(slots)]))
            self.start(slots[number % len(slots)], step)
        last = range(max(0, len(steps) - len(slots)), len(steps))
        return results + [self.finish(slots[number % len(slots)], steps[number]) for number in last]

    def close(self) -> None:
        """Again does nothing, or what an error kept it from."""
        try:
            if self.cubins is not None and self.driver.contexts:
                self.device.drain()
                self.cubins.close()
        finally:
            self.device.close()


def _silent(what: str, done: int, total: int) -> None:
    pass

"""The made-up rank of `tests/sim`, with real kernels, on whatever GPU the tests have (in tests)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ostinato.engines.program import KernelCall, StepShape
from ostinato.plugins.kernel_launch import Constant, KernelSpec, Launch, Pointer
from ostinato.runtime.buffers import StepBuffers
from ostinato.runtime.cuda import Stream
from ostinato.runtime.device_weights import upload_weights
from ostinato.runtime.graphs import Graphs
from ostinato.runtime.step_layout import step_layout
from tests.sim.toy import BUFFERS, KERNELS, LIMITS, SHAPES, SIZES, D, ToyStep, V, W, toy_program

from .gpu import Gpu
from .steps_in_flight import StepsInFlight, silent

_CONSTANTS: dict[str, dict[str, Constant]] = {
    "embed": {"width": D}, "weigh": {"vocab": V}, "pick": {"vocab": V, "words": W},
}  # fmt: skip
_ARGUMENTS = {"cache": "cache.0", "hidden": "cut_0", "partial": "toy.partial"}


def toy_launches(shape: StepShape) -> Iterator[Launch]:
    """Of one step; pointers are named as the program's buffers are."""
    dtypes = {buffer.name: buffer.dtype for buffer in BUFFERS}
    for name, formals in KERNELS.items():
        constants = _CONSTANTS[name] | ({"rows": shape.rows} if name == "embed" else {})
        pointers = tuple(Pointer(formal, dtypes[_ARGUMENTS.get(formal, formal)]) for formal in formals)
        spec = KernelSpec("plain_kernels", name, pointers, tuple(constants.items()), num_warps=1)
        yield Launch(spec, (shape.tokens if name == "embed" else shape.rows, 1, 1))


class GpuToyRank(StepsInFlight[ToyStep]):
    """Its memory, graphs and slots put together as an executor would, sealed. `captures`: False runs eagerly."""

    poisoned = ("cut", "scratch", "output")  # nothing of these may outlive a step

    def __init__(self, gpu: Gpu, folder: Path, *, captures: bool, shapes: Sequence[StepShape] = SHAPES) -> None:
        self._gpu = gpu
        self.program = toy_program()
        (call,) = self.program.calls
        assert isinstance(call, KernelCall)
        self._arguments = call.arguments
        self._launches = {shape.key: tuple(toy_launches(shape)) for shape in SHAPES}
        gpu.prepare(launch.kernel for launches in self._launches.values() for launch in launches)
        self.layout = step_layout(self.program, LIMITS, SIZES)
        self.device = gpu.new_device()
        try:
            self.stream = self.device.stream()
            self.buffers = StepBuffers(self.device, self.layout)
            upload_weights(folder / "weights.bin", self.buffers, self.stream, silent, chunk=500)
            self.buffers.clear(self.stream)
            self.graphs = Graphs(self.stream, self.record, is_strict=captures)
            if captures:
                self.graphs.capture(shapes, silent)
                self.buffers.clear(self.stream)  # the first runs have written the null block
            self.stream.wait("getting ready")
            self.device.seal()
        except BaseException:
            self.device.close()
            raise

    def record(self, shape: StepShape, part: str, stream: Stream) -> None:
        addresses = self.buffers.addresses(shape)
        layouts = (self.layout.inputs[shape.key], self.layout.outputs[shape.key], *self.layout.blocks.values())
        places = {name: place.num_bytes for layout in layouts for name, place in layout.places.items()}
        self._gpu.see({addresses[name]: num_bytes for name, num_bytes in places.items()})
        named = {formal: addresses[buffer] for formal, buffer in self._arguments.items()}
        self._gpu.launch(self._launches[shape.key], named, stream)

    def caches(self) -> bytes:
        """What all steps so far have left in the cache."""
        pinned = self._gpu.device.allocate_pinned(self.layout.num_bytes("cache"), "a look at the cache")
        self.stream.download(pinned.address, self.buffers.address("cache"), pinned.num_bytes)
        self.stream.wait("a look at the cache")
        found = pinned.view.tobytes()
        pinned.close()
        return found


def poisoned(steps: Sequence[ToyStep], seed: int) -> list[ToyStep]:
    """The steps with wild pads: any token, written to the null block; rows of no request with any mask."""
    rng = np.random.default_rng(seed)
    changed = []
    for step in steps:
        inputs = {name: array.copy() for name, array in step.inputs.items()}
        inputs["input_ids"][step.live_tokens :] = rng.integers(V)
        inputs["slot_mapping"][step.live_tokens :] = 2**31 - 1
        inputs["logits_indices"][step.live_rows :] = rng.integers(step.shape.tokens)
        inputs["allowed"][step.mask_lines :] = -559038737
        changed.append(replace(step, inputs=inputs))
    return changed

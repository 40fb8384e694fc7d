"""A decoder on a GPU: torch's matrix products between our kernels, over our buffers, captured by us (in tests)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ostinato.engines.program import StepShape
from ostinato.plugins.feed_tokens_launch import feed_tokens_launches
from ostinato.runtime.buffers import StepBuffers
from ostinato.runtime.cuda import Stream
from ostinato.runtime.graphs import Graphs
from ostinato.runtime.step_layout import step_layout

from .gpu import Gpu
from .stack_layers import Cuts, Layers
from .stack_program import StackSizes, stack_program
from .stack_steps import StackStep
from .steps_in_flight import StepsInFlight, silent


class StackRank(StepsInFlight[StackStep]):
    """Ready to run its step shapes, sealed. `captures`: False runs every step eagerly. `num_slots`: steps in flight."""

    poisoned = ("cut", "scratch")  # the tokens that are fed lie in the output

    def __init__(self, gpu: Gpu, stack: StackSizes, *, captures: bool, num_slots: int = 2) -> None:
        self._gpu, self.stack = gpu, stack
        self.layout = step_layout(stack_program(stack), stack.limits, stack.sizes)
        gpu.prepare(launch.kernel for launch in stack.launches())
        self.device = gpu.new_device()
        try:
            self.stream = self.device.stream()
            self.buffers = StepBuffers(self.device, self.layout, num_slots=num_slots)
            self._places = {shape.key: self._sizes_of(shape) for shape in stack.shapes}
            self._cuts = {shape.key: self._cuts_of(shape) for shape in stack.shapes}
            gpu.submit(self.stream, self._make_layers)
            self.stream.wait("making weights")
            self.buffers.clear(self.stream)
            self.graphs = Graphs(self.stream, self.record, is_strict=captures)
            if captures:
                self.graphs.capture(stack.shapes, silent)
                self.buffers.clear(self.stream)
            else:
                for shape in stack.shapes:  # torch and cuBLAS load and allocate in the first runs
                    self.record(shape, "step", self.stream)
                self.buffers.clear(self.stream)
            self.stream.wait("getting ready")
            self.device.seal()
        except BaseException:
            self.device.close()
            raise

    def record(self, shape: StepShape, part: str, stream: Stream) -> None:
        gpu, addresses, cuts = self._gpu, self.buffers.addresses(shape), self._cuts[shape.key]
        gpu.see(self._places[shape.key])
        fed = {**addresses, "last_tokens": addresses["tokens"]}
        gpu.launch(feed_tokens_launches(shape), fed, stream)
        gpu.submit(stream, partial(self._embed, cuts))
        for layer in range(self.stack.sizes.num_layers):
            gpu.submit(stream, partial(self._before, layer, cuts))
            caches = {f"{kind}_cache": addresses[f"{kind}_cache.{layer}"] for kind in ("key", "value")}
            gpu.launch(self.stack.attention_launches(shape), {**addresses, **caches}, stream)
            gpu.submit(stream, partial(self._after, layer, cuts))
        gpu.submit(stream, partial(self._head, cuts))
        gpu.launch(self.stack.sampling_launches(shape), {**addresses, "counts_out": addresses["counts"]}, stream)

    # `_layers` is made on the stream, so these look it up when they run.
    def _make_layers(self) -> None:
        limits = self.stack.limits
        self._layers = Layers(
            self.stack.sizes, self.stack.dtype, self._gpu.torch_device(), limits.max_step_tokens, limits.max_rows
        )

    @property
    def weight_bytes(self) -> int:
        return self._layers.weight_bytes

    def _embed(self, cuts: Cuts) -> None:
        self._layers.embed(cuts)

    def _before(self, layer: int, cuts: Cuts) -> None:
        self._layers.before_attention(layer, cuts)

    def _after(self, layer: int, cuts: Cuts) -> None:
        self._layers.after_attention(layer, cuts)

    def _head(self, cuts: Cuts) -> None:
        self._layers.head(cuts)

    def _sizes_of(self, shape: StepShape) -> Mapping[int, int]:
        addresses = self.buffers.addresses(shape)
        layouts = (self.layout.inputs[shape.key], self.layout.outputs[shape.key], *self.layout.blocks.values())
        return {
            addresses[name]: place.num_bytes for layout in layouts for name, place in layout.places.items()
        }  # fmt: skip

    def _cuts_of(self, shape: StepShape) -> Cuts:
        """Views of our buffers; what is laid out for the largest step is cut to this one's lines."""
        addresses, cut, step = self.buffers.addresses(shape), self.layout.blocks["cut"], self.layout.inputs[shape.key]
        counts = dict.fromkeys(("q", "k", "v", "out"), shape.tokens) | {"logits": shape.rows}
        views = {
            name: self._gpu.tensor(addresses[name], self.stack.dtype, (count, cut.places[name].shape[1]))
            for name, count in counts.items()
        }
        ids, indices = (
            self._gpu.tensor(addresses[name], "int32", step.places[name].shape)
            for name in ("input_ids", "logits_indices")
        )
        return Cuts(ids, indices, **views)

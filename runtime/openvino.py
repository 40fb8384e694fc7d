"""The CPU executor: one OpenVINO request, its KV caches and the host sampler (made at start, run per step)."""

from __future__ import annotations

from functools import partial

import openvino as ov

from ostinato.engines.bundle import Bundle
from ostinato.engines.errors import DeviceError
from ostinato.engines.io_table import STEP_INPUTS
from ostinato.engines.sizes import Limits
from ostinato.plugins.host_sampling import HostSampler
from ostinato.plugins.sampling_rows import I32, Sampled, SamplingRows

from .batch import Batch
from .executor import LogitsObserver, StepRules
from .host_ticket import HostTicket
from .openvino_graph import compile_graph, read_graph
from .openvino_padding import PaddedStep, computed_tokens, pad_tokens, padded, warmup_steps, with_end_row
from .progress import Show


class OpenVINOExecutor:
    """Runs a `cpu` bundle. Tensors are bound once per shape, so that a repeated shape costs a copy and a call.

    The plugin takes slots from rows: a token of no row would be written wherever an earlier step left its slot. So
    such tokens get an end row. A float32 bundle always has one, even if empty: with fewer rows than threads and one
    token in each, the plugin would sum attention in another order, and a row alone would differ in its last bits from
    the same row in a batch.
    """

    def __init__(
        self,
        bundle: Bundle,
        limits: Limits,
        *,
        num_threads: int,
        progress: Show,
        observe_logits: LogitsObserver | None = None,
    ) -> None:
        progress("read and compile the graph", 0, 1)
        core = ov.Core()
        compiled = compile_graph(core, read_graph(core, bundle), bundle, num_threads)
        progress("read and compile the graph", 1, 1)
        self.rules = StepRules(pad_tokens(limits), partial(computed_tokens, limits), samples_in_wait=True)
        self._observe_logits = observe_logits
        self._limits = limits
        self._is_exact = bundle.manifest.weights == "float32"
        self._names = [tensor.name for tensor in STEP_INPUTS if tensor.name != "slot_mapping"]
        self._tensors: dict[tuple[str, tuple[int, ...]], ov.Tensor] = {}
        self._request = compiled.create_infer_request()
        self._sampler = HostSampler(bundle.manifest.sizes.vocab_size, num_threads)
        self._bind_caches(compiled)

    coverage = None  # it compiles at start and replays nothing

    @property
    def trouble(self) -> None:
        """None ever: a step that fails tells nothing of the next."""

    def _bind_caches(self, compiled: ov.CompiledModel) -> None:
        for port in compiled.inputs:
            name = port.get_any_name()
            if name.startswith(("key_cache.", "value_cache.")):
                shape = [
                    self._limits.num_blocks if dim.is_dynamic else dim.get_length() for dim in port.get_partial_shape()
                ]
                self._request.set_tensor(name, ov.Tensor(port.get_element_type(), ov.Shape(shape)))

    def warm(self, progress: Show) -> None:
        """Run every bucket once, so that no later step compiles a kernel."""
        steps = warmup_steps(self._limits)
        for done, step in enumerate(steps, 1):
            self._start(step)
            self._request.wait()
            progress("warm buckets", done, len(steps))

    def run(self, batch: Batch) -> HostTicket:
        """Start a step. The batch's arrays are copied here, so the caller may reuse them. Raises DeviceError."""
        try:
            self._start(padded(batch, self._limits))
        except RuntimeError as error:
            raise DeviceError(f"OpenVINO did not start a step of {batch.num_tokens} tokens: {error}") from None
        return HostTicket(self, batch)

    def _start(self, step: PaddedStep) -> None:
        if self._is_exact or step.query_starts[-1] < len(step.input_ids):
            step = with_end_row(step, self._limits.block_size)
        for name in self._names:
            array: I32 = getattr(step, name)
            key = (name, array.shape)
            tensor = self._tensors.get(key)
            if tensor is None:
                tensor = self._tensors[key] = ov.Tensor(array.copy())
            else:
                tensor.data[...] = array
            self._request.set_tensor(name, tensor)
        self._request.start_async()

    def finish(self, batch: Batch) -> Sampled:
        """Wait for the running step and sample its rows."""
        try:
            self._request.wait()
        except RuntimeError as error:
            raise DeviceError(f"OpenVINO failed in a step of {batch.num_tokens} tokens: {error}") from None
        logits = self._request.get_output_tensor(0).data[: batch.num_sampled]
        if self._observe_logits is not None and batch.num_sampled:
            self._observe_logits(logits)
        assert isinstance(batch.sampling, SamplingRows), "the CPU keeps no state"
        return self._sampler.sample(logits, batch.sampling)

    def close(self) -> None:
        self._sampler.close()

"""StatefulSampling as a TensorRT plugin: counts of output tokens stay where they are given (offline; per capture)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorrt as trt

from ostinato.engines.io_table import DEVICE_SAMPLING_INPUTS, OUTPUTS, STATE_INPUTS

from .launch_table import Sizes
from .stateful_sampling import STATEFUL_SAMPLING
from .tensorrt_plugin import OperatorPlugin

LOGITS_DTYPE = "logits_dtype"
LOGITS, LOGPROB_SLOTS, COUNTS = map(STATEFUL_SAMPLING.inputs.index, ("logits", "logprob_slots", "counts"))
_DTYPES = {tensor.name: tensor.dtype for tensor in (*DEVICE_SAMPLING_INPUTS, *STATE_INPUTS, *OUTPUTS)}


class StatefulSamplingPlugin(OperatorPlugin):
    """Steps are told apart by (rows sampled S,)."""

    schema = STATEFUL_SAMPLING
    texts = (LOGITS_DTYPE,)
    aliases = {"counts_out": "counts"}  # noqa: RUF012

    def dtype_of(self, name: str) -> str:
        return str(self._values[LOGITS_DTYPE]) if name == "logits" else _DTYPES[self.aliases.get(name, name)]

    def sizes_of(self, inputs: Sequence[Any]) -> Sizes:
        return (int(inputs[LOGITS][0]),)

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any) -> list[Any]:
        rows, width = inputs[LOGITS][0], inputs[LOGPROB_SLOTS][0]
        return [
            trt.DimsExprs([rows]),
            trt.DimsExprs([rows]),
            trt.DimsExprs([rows, width]),
            trt.DimsExprs([rows, width]),
            trt.DimsExprs(inputs[COUNTS]),
        ]

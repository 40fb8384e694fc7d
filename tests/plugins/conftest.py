"""Shared by the operator tests: function bodies under ONNX Runtime, the host kernel, and rows to sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from ostinato.plugins.fused_sampling import FUSED_SAMPLING, WORD_BITS
from ostinato.plugins.fused_sampling_onnx import fused_sampling_function
from ostinato.plugins.host_sampling import HostSampler
from ostinato.plugins.operator_schema import DOMAIN, STANDARD_OPSET, VERSION, OperatorSchema
from ostinato.plugins.sampling_rows import Sampled, SamplingRows

Array = NDArray[Any]
Run = Callable[[Mapping[str, Array]], dict[str, Array]]
MakeRun = Callable[..., Run]


def _make_run(
    schema: OperatorSchema, function: onnx.FunctionProto, feeds: Mapping[str, Array], **attributes: int | float
) -> Run:
    """A runner of one node; `feeds` gives dtypes and ranks, sizes stay open."""
    dtypes = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    node = onnx.helper.make_node(schema.name, schema.inputs, schema.outputs, domain=DOMAIN, **attributes)
    inputs = [
        onnx.helper.make_tensor_value_info(name, dtypes[name], [f"{name}.{i}" for i in range(feeds[name].ndim)])
        for name in schema.inputs
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in schema.outputs]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], schema.name, inputs, outputs),
        functions=[function],
        opset_imports=[onnx.helper.make_opsetid("", STANDARD_OPSET), onnx.helper.make_opsetid(DOMAIN, VERSION)],
        ir_version=10,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(arrays: Mapping[str, Array]) -> dict[str, Array]:
        results = session.run(list(schema.outputs), {name: arrays[name] for name in schema.inputs})
        return {name: np.asarray(result) for name, result in zip(schema.outputs, results, strict=True)}

    return run


@pytest.fixture(scope="session")
def make_run() -> MakeRun:
    return _make_run


def _make_rows(count: int, **given: Any) -> SamplingRows:
    """Neutral rows, greedy but for what is given: a number for every row, or an array [count]."""
    arrays: dict[str, Any] = {
        "uniforms": np.full(count, 0.5, np.float32),
        "temperature": np.zeros(count, np.float32),
        "top_k": np.zeros(count, np.int32),
        "top_p": np.ones(count, np.float32),
        "min_p": np.zeros(count, np.float32),
        "repetition": np.ones(count, np.float32),
        "presence": np.zeros(count, np.float32),
        "frequency": np.zeros(count, np.float32),
        "bias_ids": np.zeros((count, 0), np.int32),
        "bias_values": np.zeros((count, 0), np.float32),
        "num_logprobs": np.full(count, -1, np.int32),
    }
    for name in arrays.keys() & given.keys():
        value, default = np.asarray(given.pop(name)), arrays[name]
        arrays[name] = (np.full(count, value) if value.ndim == 0 else value).astype(default.dtype)
    arrays |= {"allowed": None, "prompt_counts": [None] * count, "output_counts": [None] * count} | given
    return SamplingRows(**arrays)


MakeRows = Callable[..., SamplingRows]


@pytest.fixture(scope="session")
def make_rows() -> MakeRows:
    return _make_rows


@pytest.fixture(scope="session")
def host_sample() -> Iterator[Callable[[Array, SamplingRows], Sampled]]:
    """The host kernel, one sampler a vocabulary size."""
    samplers: dict[int, HostSampler] = {}

    def sample(logits: Array, rows: SamplingRows) -> Sampled:
        size = logits.shape[1]
        if size not in samplers:
            samplers[size] = HostSampler(size)
        return samplers[size].sample(np.ascontiguousarray(logits, np.float32), rows)

    yield sample
    for sampler in samplers.values():
        sampler.close()


@pytest.fixture(scope="session")
def body_sample(make_run: MakeRun) -> Callable[[Array, SamplingRows], Sampled]:
    """The function body under ONNX Runtime, called like the oracle; every row reports as many logprobs as any."""
    runs: list[Run] = []

    def sample(logits: Array, rows: SamplingRows) -> Sampled:
        feeds = _feeds(logits.astype(np.float32), rows)
        if not runs:
            runs.append(make_run(FUSED_SAMPLING, fused_sampling_function(), feeds))
        return Sampled(**runs[0](feeds))

    return sample


def _feeds(logits: Array, rows: SamplingRows) -> dict[str, Array]:
    count, size = logits.shape
    nothing = np.zeros(size, np.int32)
    arrays: dict[str, Any] = {name: getattr(rows, name) for name in FUSED_SAMPLING.inputs if hasattr(rows, name)}
    for name in ("prompt_counts", "output_counts"):
        arrays[name] = np.stack([nothing if counts is None else counts for counts in getattr(rows, name)])
    if rows.allowed is None:
        arrays["allowed"] = np.full((count, -(-size // WORD_BITS)), -1, np.int32)
    slots = np.zeros(max(0, rows.num_logprobs.max(initial=0)), np.int32)
    return arrays | {"logits": logits, "logprob_slots": slots}

"""Runs a rank's program on the CPU as a GPU would: segments by ONNX Runtime, operators by their oracles, over buffers.

Only what the program says is followed: which call reads and writes which buffer. A buffer that a call should not touch
keeps its content, so one that is used again too early spoils the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from ostinato.builder.cut import Cut, Segment
from ostinato.builder.half import Arrays
from ostinato.builder.segment_model import segment_proto
from ostinato.engines.program import Call, CollectiveCall, EngineCall, KernelCall, Program
from ostinato.plugins.collectives import all_gather, all_reduce
from ostinato.plugins.feed_tokens import feed_tokens
from ostinato.plugins.paged_attention import AttentionAttributes, AttentionInputs, paged_attention
from ostinato.plugins.stateful_sampling import stateful_sampling

from .bfloat_session import BfloatSession

OPSET = 23
_OUTCOMES = {"AllReduce": all_reduce, "AllGather": all_gather}
Buffers = dict[str, Any]


def tensor_of(name: str, array: Any) -> onnx.TensorProto:
    kinds = {
        "float16": onnx.TensorProto.FLOAT16,
        "float32": onnx.TensorProto.FLOAT,
        "bfloat16": onnx.TensorProto.BFLOAT16,
    }
    return onnx.TensorProto(
        name=name, data_type=kinds[array.dtype.name], dims=array.shape, raw_data=np.ascontiguousarray(array).tobytes()
    )


def session_of(segment: Segment, parameters: Arrays) -> onnxruntime.InferenceSession | BfloatSession:
    """The segment with its weights inside, as its engine has it."""
    tensors = [tensor_of(segment.tensor(value), parameters[value.name]()) for value in segment.parameters]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    # Casts as written: folding them away would hide what half precision does.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = segment_proto(segment, tensors, OPSET)
    if any(value.dtype == ir.DataType.BFLOAT16 for node in segment.nodes for value in node.outputs):
        return BfloatSession(model, options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


@dataclass
class ProgramRunner:
    """One rank. `buffers`: what the device holds; caches, state and shared weights are there from the start."""

    program: Program
    sessions: Mapping[str, onnxruntime.InferenceSession | BfloatSession]
    attributes: AttentionAttributes
    buffers: Buffers = field(default_factory=dict)
    seen: Callable[[str, Any], None] = lambda name, array: None

    @property
    def table_width(self) -> int:
        width = self.program.buffer("block_tables").shape[1]
        assert isinstance(width, int)
        return width

    def step(self, feeds: Mapping[str, Any]) -> Buffers:
        """Upload the inputs and make every call in turn; returns the buffers."""
        self.upload(feeds)
        for call in self.program.calls:
            self.run(call)
        return self.buffers

    def upload(self, feeds: Mapping[str, Any]) -> None:
        inputs = {buffer.name for buffer in self.program.buffers if buffer.kind == "input"}
        self.buffers |= {name: array for name, array in feeds.items() if name in inputs}
        if "feed_rows" in inputs and "feed_rows" not in feeds:
            self.buffers["feed_rows"] = np.full(len(feeds["input_ids"]), -1, np.int32)
        tables = feeds["block_tables"]
        self.buffers["block_tables"] = np.pad(tables, ((0, 0), (0, self.table_width - tables.shape[1])))

    def run(self, call: Call) -> None:
        if isinstance(call, EngineCall):
            self._run_engine(call)
        elif isinstance(call, KernelCall) and call.operator == "PagedAttention":
            self._attend(call.arguments)
        elif isinstance(call, KernelCall) and call.operator == "FeedTokens":
            if (self.buffers["feed_rows"] >= 0).any():  # else no step may have been before
                given = {formal: self.buffers[buffer] for formal, buffer in call.arguments.items()}
                self.buffers["input_ids"] = feed_tokens(given)
        elif isinstance(call, KernelCall):
            given = {formal: self.buffers.get(buffer) for formal, buffer in call.arguments.items()}
            self._store(call.arguments, stateful_sampling({k: v for k, v in given.items() if v is not None}))
        else:
            raise AssertionError("collectives need all ranks")

    def _run_engine(self, call: EngineCall) -> None:
        session = self.sessions[call.name]
        feeds = {tensor: self.buffers[buffer] for tensor, buffer in call.inputs.items()}
        outputs = list(call.outputs)
        for tensor, array in zip(outputs, session.run(outputs, feeds), strict=True):
            self.seen(f"{call.name}/{tensor}", array)
            self.buffers[call.outputs[tensor]] = array

    def _attend(self, arguments: Mapping[str, str]) -> None:
        names = AttentionInputs.__dataclass_fields__
        inputs = AttentionInputs(**{name: self.buffers[arguments[name]] for name in names})
        found = paged_attention(inputs, self.attributes)
        outputs = {"out": found.out, "key_cache_out": found.key_cache_out, "value_cache_out": found.value_cache_out}
        self._store(arguments, outputs)

    def _store(self, arguments: Mapping[str, str], outputs: Mapping[str, Any]) -> None:
        for formal, array in outputs.items():
            self.buffers[arguments[formal]] = array


def runner_of(
    cut: Cut, program: Program, parameters: Arrays, attributes: AttentionAttributes, num_blocks: int
) -> ProgramRunner:
    """A rank whose caches hold garbage, as they would on a device, and whose shared weights are in place."""
    sessions = {segment.name: session_of(segment, parameters) for segment in cut.segments}
    rng = np.random.default_rng(7)
    buffers: Buffers = {value.name: parameters[value.name]() for value in cut.shared}
    for buffer in program.buffers:
        if buffer.kind == "cache":
            shape = [num_blocks if isinstance(size, str) else size for size in buffer.shape]
            dtype = ml_dtypes.bfloat16 if buffer.dtype == "bfloat16" else buffer.dtype
            buffers[buffer.name] = rng.normal(size=shape).astype(dtype)
    return ProgramRunner(program, sessions, attributes, buffers)


def step_together(ranks: Sequence[ProgramRunner], feeds: Mapping[str, Any]) -> Buffers:
    """One step of all slices of a stage: they meet at collectives. Returns the first one's buffers."""
    for rank in ranks:
        rank.upload(feeds)
    for calls in zip(*(rank.program.calls for rank in ranks), strict=True):
        if not isinstance(calls[0], CollectiveCall):
            for rank, call in zip(ranks, calls, strict=True):
                rank.run(call)
            continue
        sources = [rank.buffers[call.source] for rank, call in zip(ranks, calls, strict=True)]
        for rank, call in zip(ranks, calls, strict=True):
            rank.buffers[call.target] = _OUTCOMES[calls[0].operator](sources)
    return ranks[0].buffers


def neutral_device_sampling(num_rows: int, vocab_size: int) -> dict[str, Any]:
    """Greedy, no penalty, everything allowed; row i of the step has line i + 1 of the state."""
    floats = {"uniforms": 0.5, "temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0}
    floats |= {"presence": 0.0, "frequency": 0.0}
    return {name: np.full(num_rows, value, np.float32) for name, value in floats.items()} | {
        "top_k": np.zeros(num_rows, np.int32),
        "state_rows": np.arange(1, num_rows + 1, dtype=np.int32),
        "mask_rows": np.full(num_rows, -1, np.int32),
        "num_logprobs": np.full(num_rows, -1, np.int32),
        "allowed": np.zeros((num_rows, -(-vocab_size // 32)), np.int32),
        "logprob_slots": np.zeros(20, np.int32),
    }


def empty_state(num_lines: int, vocab_size: int, max_bias: int) -> dict[str, Any]:
    return {
        "bias_ids": np.full((num_lines, max_bias), 2**31 - 1, np.int32),
        "bias_values": np.zeros((num_lines, max_bias), np.float32),
        "counts": np.zeros((num_lines, vocab_size), np.int32),
    }

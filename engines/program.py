"""A rank's program: what one step does on a GPU, call by call, over named buffers (written offline, read at start).

    inputs ─▶ segment_00 ─▶ q,k,v ─▶ attention_00 (kernels) ─▶ segment_01 ─▶ … ─▶ logits ─▶ sampling (kernels) ─▶ tokens
       └─ feed (kernel): ids that the step before sampled

On `rtx`, and on `trt` with operators between, engine segments and kernels alternate; on `trt` with operators inside
there is one engine call. A rank that takes ids and samples feeds itself before all else. Every launch of every step
shape is recorded here, so the runtime computes none: the program is what a captured graph replays.

Symbols in shapes: T tokens, B rows, S rows sampled, P table width, N blocks, R state lines, V vocabulary, W ⌈V/32⌉,
M bias entries, K logprobs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from .errors import BundleError
from .io_table import Dim
from .json_record import json_table, record_from

FILE_NAME = "program.json"
Kind = Literal["input", "state", "cache", "weight", "cut", "scratch", "output"]
Phase = Literal["decode", "prefill"]
DTYPE_BYTES = {
    "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class StepShape:
    """What one captured graph is for: a decode step of `rows` one-token rows, or a prefill of up to `tokens` tokens.

    decode: T = B = S = rows. prefill: T = tokens, B = S = rows (always the row limit).
    """

    phase: Phase
    tokens: int
    rows: int

    @cached_property
    def key(self) -> str:
        """Stable name, such as "decode 8" or "prefill 512"."""
        return f"{self.phase} {self.tokens}"


@dataclass(frozen=True)
class Buffer:
    """One device tensor with a fixed address.

    input: uploaded each step. state: kept from step to step, one line a live request. cache: KV blocks.
    weight: uploaded once from weights.bin at `offset`. cut: passes from one call to a later one.
    scratch: within one call.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    kind: Kind
    offset: int = 0


@dataclass(frozen=True)
class EngineCall:
    """Enqueue an engine: its tensor names → buffers."""

    name: str
    engine: str  # file in the rank's folder
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class KernelCall:
    """Launch an operator's kernels, as `Program.launches` lists them for the step's shape."""

    name: str
    operator: str  # "PagedAttention", "StatefulSampling" or "FeedTokens"
    arguments: Mapping[str, str]  # the operator's input, output and scratch names → buffers


@dataclass(frozen=True)
class CollectiveCall:
    """One collective over the tensor-parallel group, in place of `source` or into `target`."""

    name: str
    operator: str  # "AllReduce" or "AllGather"
    source: str
    target: str


Call = EngineCall | KernelCall | CollectiveCall


@dataclass(frozen=True)
class KernelLaunch:
    """One launch: `kernel` names a cubin (kernels/sm_XX/{kernel}.cubin), `arguments` are pointers, by operator name."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class KernelInfo:
    """What the driver needs to launch one cubin, and what it costs. `entry`: the function's name in the cubin.

    Arguments are followed by `num_hidden_pointers` null pointers that the compiler added.
    """

    entry: str
    num_warps: int
    shared_bytes: int
    num_hidden_pointers: int
    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class Program:
    """Everything of one rank. `launches`: operator → step shape's key → launches in order.

    `kernels`: "sm_86" → kernel name → how to launch it. `step_shapes`: what is captured, in ascending order.
    """

    buffers: tuple[Buffer, ...]
    calls: tuple[Call, ...]
    step_shapes: tuple[StepShape, ...]
    launches: Mapping[str, Mapping[str, tuple[KernelLaunch, ...]]]
    kernels: Mapping[str, Mapping[str, KernelInfo]]

    def buffer(self, name: str) -> Buffer:
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def to_json(self) -> str:
        table = asdict(self)
        table["calls"] = [{"call": type(call).__name__, **asdict(call)} for call in self.calls]
        return json.dumps(table, indent=1, sort_keys=True) + "\n"


def program_from_json(text: str, where: Path) -> Program:
    """Parse a program; refuses what this version does not know."""
    table = json_table(text, where)
    calls = table.get("calls")
    tags = [call.pop("call", None) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    program = record_from(Program, table, where)
    if tags != [type(call).__name__ for call in program.calls]:  # the fields decide, the tag must agree
        raise BundleError(f"{where} has a call of an unknown kind: build the bundle again")
    return program

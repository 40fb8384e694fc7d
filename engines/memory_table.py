"""What a bundle takes of a GPU's memory, and how long a step takes, by step shape (written offline, read at start)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryTable:
    """Bytes of the rank that takes most; keys of `activation_bytes` are those of `StepShape`.

    `weight_bytes`: on the device, rope tables included. `kv_bytes_per_block`: all layers, keys and values, scales of
    quantized caches. `state_bytes`: what sampling keeps from step to step. `scratch_bytes`: between the kernels of one
    call. `activation_bytes`: inputs, outputs, cut tensors and the engines' own memory of one step; the largest
    counts. `graph_reserve_bytes`: of all captured graphs. `num_blocks`: what the limits ask for, block 0 included.
    """

    weight_bytes: int
    kv_bytes_per_block: int
    state_bytes: int
    scratch_bytes: int
    activation_bytes: Mapping[str, int]
    graph_reserve_bytes: int
    num_blocks: int

    @property
    def fixed_bytes(self) -> int:
        """Everything but the KV blocks."""
        return (
            self.weight_bytes
            + self.state_bytes
            + self.scratch_bytes
            + max(self.activation_bytes.values(), default=0)
            + self.graph_reserve_bytes
        )

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.num_blocks * self.kv_bytes_per_block


@dataclass(frozen=True)
class Latency:
    """One step's time in milliseconds. `basis` says of what it is predicted, or on what it was measured."""

    predicted_ms: float
    measured_ms: float | None
    basis: str


LatencyTable = Mapping[str, Latency]  # keys are those of `StepShape`; empty where no GPU was named

"""What stands for a collective in a graph that TensorRT's parser reads (offline)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """`operator`: "AllReduce" or "AllGather" over the `group_size` slices of one pipeline stage."""

    operator: str
    group_size: int

"""AllReduce and AllGather over the tensor-parallel group: their schemas and NumPy oracles (offline, and in tests).

    rank 0: x₀ ─┐                        rank 0: x₀ ─┐
    rank 1: x₁ ─┴ AllReduce ─▶ x₀ + x₁   rank 1: x₁ ─┴ AllGather ─▶ [x₀; x₁] along axis 0

Every rank of the group gets the same outcome. Gathering along the first axis is what NCCL and TensorRT do without a
copy: a graph that wants another axis turns it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .operator_schema import Attribute, OperatorSchema

Floats = NDArray[np.floating[Any]]
_GROUP = (Attribute("group_size", int),)  # ranks that take part: the tensor-parallel slices of one stage

ALL_REDUCE = OperatorSchema("AllReduce", inputs=("x",), outputs=("y",), attributes=_GROUP)
ALL_GATHER = OperatorSchema("AllGather", inputs=("x",), outputs=("y",), attributes=_GROUP)


def all_reduce(parts: Sequence[Floats]) -> Floats:
    """The sum of one array a rank, all of one shape and dtype."""
    total: Floats = np.sum(np.stack(parts), axis=0, dtype=parts[0].dtype)
    return total


def all_gather(parts: Sequence[Floats]) -> Floats:
    """One array [n, ...] a rank → [group_size * n, ...], in the order of ranks."""
    return np.concatenate(parts, axis=0)

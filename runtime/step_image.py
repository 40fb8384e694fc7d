"""The last step that was written into a slot, array by array, to be copied when the next is nearly the same (per step).

image   ids 0 0 0 │ positions 17 30 9 │ slots … │ starts 0 1 2 3 │ … │ temperature … │       one copy, and over it
batch    same       moved               moved     same                 same                  positions, slots, lengths
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter, is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batch import Batch
from .buffers import Arrays
from .device_rows import DeviceRows

_MOVING = ("positions", "slot_mapping", "context_lens")
_APART = ("block_tables", "sampling", "uniforms", "masks", "num_late_masks", "joined")  # always written, or no inputs
_STILL, _SAMPLING = (
    tuple(field.name for field in fields(kind) if field.name not in (*_MOVING, *_APART)) for kind in (Batch, DeviceRows)
)
_moving = attrgetter(*_MOVING)
_still = attrgetter(*_STILL)
_sampling = attrgetter(*_SAMPLING)


class StepImage:
    """A copy of a slot's plain memory as a batch left it. A batch's arrays are never written again: the same is equal.

    Only steps of decode rows are kept: others are not alike.
    """

    def __init__(self, arrays: Arrays, plain: Sequence[NDArray[np.uint8]]) -> None:
        self._memory = list(plain)
        self._copies = [np.zeros(len(span), np.uint8) for span in plain]
        self._arrays = arrays
        self._moving: list[NDArray[Any]] = []
        self._uniforms: NDArray[Any] | None = None
        self._still: tuple[Any, ...] = ()
        self._sampling: tuple[Any, ...] = ()
        self._is_taken = False

    def take(self, batch: Batch, sampling: DeviceRows) -> None:
        """Keep what the slot holds, which is this batch."""
        count = batch.num_tokens
        self._is_taken = count == batch.num_rows == batch.num_sampled
        if not self._is_taken:
            return
        for copy, span in zip(self._copies, self._memory, strict=True):
            copy[:] = span
        self._moving = [self._arrays[name][:count] for name in _MOVING]
        self._uniforms = self._arrays["uniforms"][:count] if "uniforms" in self._arrays else None
        self._still, self._sampling = _still(batch), _sampling(sampling)

    def fill(self, batch: Batch, sampling: DeviceRows) -> bool:
        """Write a batch of which no more has changed than a token makes; False if that is not so, or not known."""
        if not self._is_taken or not _are_same(self._still, _still(batch)):
            return False
        if not _are_same(self._sampling, _sampling(sampling)):
            return False
        for copy, span in zip(self._copies, self._memory, strict=True):
            span[:] = copy
        for array, moved in zip(self._moving, _moving(batch), strict=True):
            array[:] = moved
        if self._uniforms is not None:
            self._uniforms[:] = sampling.uniforms
        return True


def _are_same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return all(map(is_, some, others))

"""Which step shape a batch is run as, and its arrays, padded, in the slot that goes up (per step).

decode 8    5 rows of one sampled token     ids, slots … of 5 tokens │ pads: id 0, slot 0 (the null block)
                                            query_starts 0 1 2 3 4 5 5 5 5: a pad row has no token
                                            state_rows of 5 │ 0: such a row of sampling is skipped

A slot is always written whole. Where most arrays of a batch are those of one before, the very same, all are copied at
once from an image of that step, and only what moved is written over it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.errors import DeviceError
from ostinato.engines.program import StepShape
from ostinato.engines.sizes import Limits

from .batch import Batch
from .buffers import Arrays
from .device_rows import DeviceRows
from .step_image import StepImage

_TOKENS = ("input_ids", "positions", "slot_mapping")
_ROWS = ("context_lens",)
_SAMPLED = (  # what sampling reads of a live row alone
    "uniforms", "temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency",
)  # fmt: skip
_SAMPLED_PADS = (("state_rows", 0), ("mask_rows", -1), ("num_logprobs", -1))
Fill = tuple[str, NDArray[Any], int]  # a field of the batch, where it goes, and what pads it


class StepShapes:
    """The shapes of a program that steps within these limits need, ascending: `needed`."""

    def __init__(self, shapes: Sequence[StepShape], limits: Limits) -> None:
        self._decode = _up_to([shape for shape in shapes if shape.phase == "decode"], limits.max_rows)
        self._prefill = _up_to([shape for shape in shapes if shape.phase == "prefill"], limits.max_step_tokens)
        self._decode_tokens = [shape.tokens for shape in self._decode]
        self._prefill_tokens = [shape.tokens for shape in self._prefill]
        self.needed = (*self._decode, *self._prefill)

    def of(self, batch: Batch) -> StepShape:
        """The smallest that holds the batch. Raises DeviceError if none does."""
        shape = self._find(batch.num_rows, batch.num_tokens, batch.num_sampled)
        if shape is None:
            raise DeviceError(
                f"a step of {batch.num_rows} rows with {batch.num_tokens} tokens, {batch.num_sampled} of them sampled, "
                f"fits none of {', '.join(shape.key for shape in self.needed)}: give smaller limits, or build with "
                "larger ones"
            )
        return shape

    def computed_tokens(self, num_rows: int, num_tokens: int, num_sampled: int) -> int:
        """Those of the shape that such a step is run as; its own where none holds it, so that it is not run."""
        shape = self._find(num_rows, num_tokens, num_sampled)
        return num_tokens if shape is None else shape.tokens

    def _find(self, num_rows: int, num_tokens: int, num_sampled: int) -> StepShape | None:
        if num_tokens == num_rows == num_sampled:
            place, shapes = bisect_left(self._decode_tokens, num_tokens), self._decode
        else:
            place, shapes = bisect_left(self._prefill_tokens, num_tokens), self._prefill
        if place == len(shapes) or max(num_rows, num_sampled) > shapes[place].rows:
            return None
        return shapes[place]


def _up_to(shapes: Sequence[StepShape], most: int) -> list[StepShape]:
    """All that are too small, and the first that is not."""
    ascending = sorted(shapes, key=lambda shape: shape.tokens)
    return ascending[: 1 + sum(shape.tokens < most for shape in ascending)]


class StepInputs:
    """One slot's arrays for one step shape; those that the rank's program does not take are left out.

    `plain`: their memory, but for masks and tables.
    """

    def __init__(self, arrays: Arrays, plain: Sequence[NDArray[np.uint8]]) -> None:
        def fills(*named: tuple[str, int]) -> list[Fill]:
            return [(name, arrays[name], pad) for name, pad in named if name in arrays]

        self._tokens = fills(*((name, 0) for name in _TOKENS))
        self._rows = fills(*((name, 0) for name in _ROWS))
        self._indices = fills(("logits_indices", 0))
        self._sampling = fills(*((name, 0) for name in _SAMPLED), *_SAMPLED_PADS)
        self._feed = arrays.get("feed_rows")
        self._starts, self._tables = arrays["query_starts"], arrays.get("block_tables")
        self._masks = arrays.get("allowed")
        self._image = StepImage(arrays, plain)

    def fill(self, batch: Batch, sampling: DeviceRows) -> int:
        """Write the batch; returns how many lines of masks it has so far."""
        if not self._image.fill(batch, sampling):
            self._fill_plain(batch, sampling)
            self._image.take(batch, sampling)
        if self._tables is not None:
            height, width = batch.block_tables.shape
            self._tables[:height, :width] = batch.block_tables  # no kernel reads past a row's blocks, or in a pad row
        return self.add_masks(0, sampling.masks) if self._sampling else 0

    def _fill_plain(self, batch: Batch, sampling: DeviceRows) -> None:
        """All but tables and masks."""
        num_tokens, num_rows = batch.num_tokens, batch.num_rows
        _write(self._tokens, batch, num_tokens)
        _write(self._rows, batch, num_rows)
        _write(self._indices, batch, batch.num_sampled)
        self._starts[: num_rows + 1] = batch.query_starts
        self._starts[num_rows + 1 :] = num_tokens
        if self._feed is not None:
            if batch.feed_rows is None:
                self._feed[:] = -1
            else:
                self._feed[:num_tokens] = batch.feed_rows
                self._feed[num_tokens:] = -1
        _write(self._sampling, sampling, batch.num_sampled)

    def add_masks(self, first: int, masks: NDArray[Any]) -> int:
        """Write lines of masks from number `first` on; returns how many there are then."""
        end = first + len(masks)
        if len(masks):
            assert self._masks is not None, "the program takes no masks"
            self._masks[first:end] = masks
        return end


def _write(fills: Sequence[Fill], source: object, count: int) -> None:
    for name, target, pad in fills:
        target[:count] = getattr(source, name)
        if count < len(target):
            target[count:] = pad

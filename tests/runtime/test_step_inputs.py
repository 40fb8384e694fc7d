"""Which step shape a batch takes, and what pads say: nothing that reads or writes a live block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ostinato.engines.errors import DeviceError
from ostinato.engines.program import StepShape
from ostinato.engines.sizes import Limits
from ostinato.runtime.batch import Batch
from ostinato.runtime.buffers import views
from ostinato.runtime.device_rows import DeviceRows
from ostinato.runtime.step_image import StepImage
from ostinato.runtime.step_inputs import StepInputs, StepShapes
from ostinato.runtime.step_layout import Layout, Place, StepLayout, aligned

SHAPES = (
    *(StepShape("decode", rows, rows) for rows in (1, 2, 4, 8)),
    *(StepShape("prefill", tokens, 8) for tokens in (16, 32, 64)),
)
LIMITS = Limits(8, 8, 64, 96, 512, (1, 8), (64,))
POISON = 2**31 - 1
_T, _B, _S, _P, _W = 16, 8, 8, 12, 10


def batch_of(num_rows: int, num_tokens: int, num_sampled: int, *, feeds: bool = False, num_masks: int = 0) -> Batch:
    """Every number is its place + 1, so that none looks like a pad."""

    def ints(count: int) -> np.ndarray[Any, Any]:
        return np.arange(1, count + 1, dtype=np.int32)

    floats = np.ones(num_sampled, np.float32)
    sampling = DeviceRows(
        uniforms=floats, temperature=floats, top_k=ints(num_sampled), top_p=floats, min_p=floats, repetition=floats,
        presence=floats, frequency=floats, state_rows=ints(num_sampled), mask_rows=ints(num_sampled) - 1,
        num_logprobs=ints(num_sampled), masks=np.full((num_masks, _W), 7, np.int32), num_late_masks=0, joined=(),
    )  # fmt: skip
    return Batch(
        input_ids=ints(num_tokens),
        positions=ints(num_tokens),
        slot_mapping=ints(num_tokens),
        query_starts=np.append(np.arange(num_rows), num_tokens).astype(np.int32),
        context_lens=ints(num_rows),
        block_tables=np.tile(ints(3), (num_rows, 1)),
        logits_indices=ints(num_sampled) - 1,
        feed_rows=ints(num_tokens) - 1 if feeds else None,
        sampling=sampling,
    )


_FLOATS = ("uniforms", "temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_SAMPLED = ("top_k", "state_rows", "mask_rows", "num_logprobs", "logits_indices")
_PLACES = {
    **dict.fromkeys(("input_ids", "positions", "slot_mapping"), (_T,)),
    "query_starts": (_B + 1,),
    "context_lens": (_B,),
    "block_tables": (_B, _P),
    **dict.fromkeys(_SAMPLED, (_S,)),
    "feed_rows": (_T,),
    **dict.fromkeys(_FLOATS, (_S,)),
    "allowed": (_S, _W),
}


class Slot:
    """A slot's memory, poisoned: its arrays, and its plain parts."""

    def __init__(self) -> None:
        places: dict[str, Place] = {}
        for name, shape in _PLACES.items():
            offset = aligned(max((place.end for place in places.values()), default=0))
            places[name] = Place(offset, "float32" if name in _FLOATS else "int32", shape)
        layout = Layout(places)
        self._block = np.zeros(layout.num_bytes, np.uint8)
        self.arrays = views(self._block, layout, layout.num_bytes)
        steps = StepLayout({}, {"decode": layout}, {}, {}, {})
        self.plain = [self._block[start:end] for start, end in steps.plain_spans("decode")]
        self.inputs = StepInputs(self.arrays, self.plain)
        self.poison()

    def poison(self) -> None:
        for array in self.arrays.values():
            array[:] = POISON if array.dtype == np.int32 else np.nan


@pytest.mark.parametrize(("rows", "tokens", "sampled"), [(3, 3, 3), (2, 9, 1), (8, 16, 8), (1, 16, 0), (5, 7, 7)])
@pytest.mark.parametrize("feeds", [False, True])
def test_pads_are_pads(rows: int, tokens: int, sampled: int, feeds: bool) -> None:
    slot, batch = Slot(), batch_of(rows, tokens, sampled, feeds=feeds, num_masks=min(2, sampled))
    arrays, sampling = slot.arrays, batch.sampling
    assert isinstance(sampling, DeviceRows)
    assert slot.inputs.fill(batch, sampling) == min(2, sampled)
    for name in ("input_ids", "positions", "slot_mapping"):
        assert arrays[name].tolist() == [*getattr(batch, name), *[0] * (_T - tokens)]
    assert arrays["feed_rows"].tolist() == [*(range(tokens) if feeds else [-1] * tokens), *[-1] * (_T - tokens)]
    assert arrays["query_starts"].tolist() == [*batch.query_starts, *[tokens] * (_B - rows)]
    assert arrays["context_lens"].tolist() == [*batch.context_lens, *[0] * (_B - rows)]
    assert arrays["block_tables"][:rows, :3].tolist() == batch.block_tables.tolist()
    left = np.concatenate([arrays["block_tables"][rows:].ravel(), arrays["block_tables"][:, 3:].ravel()])
    assert (left == POISON).all(), "what no kernel reads costs nothing"
    for name, pad in (("state_rows", 0), ("mask_rows", -1), ("num_logprobs", -1)):
        assert arrays[name].tolist() == [*getattr(sampling, name), *[pad] * (_S - sampled)]
    assert all(0 <= index < _T for index in arrays["logits_indices"])
    assert not np.isnan(arrays["temperature"]).any()


def test_late_masks_follow_those_that_are_known() -> None:
    slot, batch = Slot(), batch_of(4, 4, 4, num_masks=1)
    assert isinstance(batch.sampling, DeviceRows)
    arrays, inputs = slot.arrays, slot.inputs
    first = inputs.fill(batch, batch.sampling)
    assert inputs.add_masks(first, np.full((2, _W), 9, np.int32)) == 3
    assert [int(line[0]) for line in arrays["allowed"]] == [7, 9, 9, *[POISON] * (_S - 3)]


def _a_token_later(batch: Batch) -> Batch:
    assert isinstance(batch.sampling, DeviceRows)
    uniforms = batch.sampling.uniforms * np.float32(0.5)
    return replace(
        batch,
        positions=batch.positions + 1,
        slot_mapping=batch.slot_mapping + 1,
        context_lens=batch.context_lens + 1,
        block_tables=batch.block_tables + 1,
        sampling=replace(batch.sampling, uniforms=uniforms),
    )


@pytest.mark.parametrize("feeds", [False, True])
@pytest.mark.parametrize("num_masks", [0, 2])
def test_a_step_like_the_last_is_written_whole_into_poisoned_memory(feeds: bool, num_masks: int) -> None:
    slot, batch = Slot(), batch_of(5, 5, 5, feeds=feeds, num_masks=num_masks)
    for step in range(12):
        if step == 4:
            batch = batch_of(3, 3, 3, feeds=feeds, num_masks=num_masks)  # other rows
        elif step == 7:
            batch = batch_of(5, 9, 2, feeds=feeds)  # a prompt
        elif step == 8:
            batch = batch_of(3, 3, 3)
        elif step == 10:
            assert isinstance(batch.sampling, DeviceRows)
            colder = replace(batch.sampling, temperature=batch.sampling.temperature * np.float32(0.5))
            batch = replace(batch, sampling=colder, input_ids=batch.input_ids + 9)
        else:
            batch = _a_token_later(batch)
        assert isinstance(batch.sampling, DeviceRows)
        fresh = Slot()
        slot.poison()
        assert slot.inputs.fill(batch, batch.sampling) == fresh.inputs.fill(batch, batch.sampling)
        for name, array in slot.arrays.items():
            np.testing.assert_array_equal(array, fresh.arrays[name], name)


def test_what_no_step_has_written_is_not_taken_for_its_image() -> None:
    """The first batch of a slot, and the first after a step of another kind, find nothing that is theirs."""
    slot, batch = Slot(), batch_of(4, 4, 4)
    assert isinstance(batch.sampling, DeviceRows)
    image = StepImage(slot.arrays, slot.plain)
    assert not image.fill(batch, batch.sampling)
    slot.inputs.fill(batch, batch.sampling)
    image.take(batch, batch.sampling)
    assert image.fill(_a_token_later(batch), batch.sampling)
    assert not image.fill(replace(batch, query_starts=batch.query_starts.copy()), batch.sampling)
    assert not image.fill(batch, replace(batch.sampling, top_k=batch.sampling.top_k.copy()))
    image.take(batch_of(2, 9, 2), batch.sampling)
    assert not image.fill(batch, batch.sampling)


@pytest.mark.parametrize(
    ("rows", "tokens", "sampled", "key"),
    [
        (1, 1, 1, "decode 1"),
        (3, 3, 3, "decode 4"),
        (8, 8, 8, "decode 8"),
        (1, 1, 0, "prefill 16"),  # the middle of a prompt
        (3, 3, 2, "prefill 16"),
        (2, 17, 2, "prefill 32"),
        (8, 64, 8, "prefill 64"),
    ],
)
def test_the_smallest_shape_that_holds_the_batch(rows: int, tokens: int, sampled: int, key: str) -> None:
    assert StepShapes(SHAPES, LIMITS).of(batch_of(rows, tokens, sampled)).key == key


def test_only_shapes_that_steps_can_need_are_kept() -> None:
    small = Limits(8, 3, 20, 96, 512, (1, 3), (20,))
    assert [shape.key for shape in StepShapes(SHAPES[::-1], small).needed] == [
        "decode 1", "decode 2", "decode 4", "prefill 16", "prefill 32",
    ]  # fmt: skip


@pytest.mark.parametrize(("rows", "tokens", "sampled"), [(9, 9, 9), (1, 65, 1), (9, 20, 1), (2, 20, 9)])
def test_what_fits_none_is_refused(rows: int, tokens: int, sampled: int) -> None:
    with pytest.raises(DeviceError, match="fits none of decode 1, decode 2"):
        StepShapes(SHAPES, LIMITS).of(batch_of(rows, tokens, sampled))

"""Batches, masks and results as bytes: what goes in comes out, bit for bit, and bad bytes are refused."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from ostinato.engines.errors import DeviceError
from ostinato.engines.sizes import MAX_LOGIT_BIAS, MAX_LOGPROBS, Limits
from ostinato.plugins.sampling_rows import F32, I32, Sampled
from ostinato.runtime.batch import Batch
from ostinato.runtime.batch_bytes import (
    batch_bytes,
    batch_from,
    max_batch_words,
    max_sampled_words,
    sampled_bytes,
    sampled_from,
    table_bytes,
    table_from,
)
from ostinato.runtime.device_rows import DeviceRows, StateLine

from ..scale import scaled

LIMITS = Limits(4, 3, 9, 20, 40, (1, 3), (1, 3, 9))
VOCAB = 70


def numbers(seed: int, *shape: int) -> I32:
    """Any bits."""
    return np.random.default_rng(seed).integers(-(2**31), 2**31, shape).astype(np.int32)


def floats(seed: int, *shape: int) -> F32:
    """Any bits: NaNs with payloads, infinities, both zeros."""
    return numbers(seed, *shape).view(np.float32)


@st.composite
def batches(draw: DrawFn) -> Batch:
    """Any lengths, from none; what they hold is of no concern here."""
    tokens, rows, width, sampled, masks, words = (draw(st.integers(0, 9)) for _ in range(6))
    seeds = iter(range(draw(st.integers(0, 99)), 1000))
    lines = draw(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9)), max_size=3))
    joined = tuple(
        StateLine(
            line=place,
            bias_ids=numbers(next(seeds), count) if has_bias else None,
            bias_values=floats(next(seeds), count) if has_bias else None,
            counts=numbers(next(seeds), count) if has_counts else None,
        )
        for place, (has_bias, has_counts, count) in enumerate(lines)
    )
    of_sampling: dict[str, Any] = {
        one.name: (numbers if "I32" in str(one.type) else floats)(next(seeds), sampled)
        for one in fields(DeviceRows)
        if one.name not in ("masks", "num_late_masks", "joined")
    }
    rows_sampled = DeviceRows(
        **of_sampling, masks=numbers(next(seeds), masks, words), num_late_masks=draw(st.integers(0, 5)), joined=joined
    )
    return Batch(
        input_ids=numbers(next(seeds), tokens),
        positions=numbers(next(seeds), tokens),
        slot_mapping=numbers(next(seeds), tokens),
        query_starts=numbers(next(seeds), rows + 1),
        context_lens=numbers(next(seeds), rows),
        block_tables=numbers(next(seeds), rows, 2 * width)[:, ::2],  # a view with gaps
        logits_indices=numbers(next(seeds), sampled),
        feed_rows=draw(st.sampled_from([None, numbers(next(seeds), tokens)])),
        sampling=rows_sampled,
    )


def flat(thing: Any) -> list[Any]:
    """Everything in it, with the types, shapes and bits of arrays."""
    if isinstance(thing, np.ndarray):
        return [str(thing.dtype), thing.shape, thing.tobytes()]
    return [flat(one) for one in thing] if isinstance(thing, tuple) else [thing]


def words(content: bytes) -> I32:
    return np.frombuffer(content, np.int32)


@given(batches())
@settings(max_examples=scaled(30, 300), deadline=None)
def test_batch_comes_back_as_it_was(batch: Batch) -> None:
    assert flat(astuple(batch_from(words(batch_bytes(batch))))) == flat(astuple(batch))


@given(batches(), st.data())
@settings(max_examples=scaled(30, 300), deadline=None)
def test_batch_of_another_length_is_refused(batch: Batch, data: st.DataObject) -> None:
    whole = words(batch_bytes(batch))
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], np.append(whole, np.int32(0))):
        with pytest.raises(DeviceError, match="words from another rank are no whole message"):
            batch_from(wrong)


@given(batches(), st.data())
@settings(max_examples=scaled(60, 1000), deadline=None)
def test_headers_that_lie_are_refused_or_read_within_the_block(batch: Batch, data: st.DataObject) -> None:
    wrong = words(batch_bytes(batch)).copy()
    assert isinstance(batch.sampling, DeviceRows)
    place = data.draw(st.integers(0, min(len(wrong), 10 + 3 * len(batch.sampling.joined)) - 1))
    wrong[place] = data.draw(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 12))
    try:
        read = batch_from(wrong)
    except DeviceError:
        return
    assert len(batch_bytes(read)) == wrong.nbytes


def test_tables_and_results_come_back() -> None:
    for shape in ((0, 3), (2, 3), (1, 0)):
        table = numbers(1, *shape)
        assert flat(table_from(words(table_bytes(table)))) == flat(table)
    for lines, width in ((0, 0), (3, 0), (2, MAX_LOGPROBS)):
        sampled = Sampled(numbers(1, lines), floats(2, lines), numbers(3, lines, width), floats(4, lines, width))
        content = words(sampled_bytes(sampled)).copy()
        read = sampled_from(content)
        content[:] = 7  # the ring's next message
        assert flat(astuple(read)) == flat(astuple(sampled))


@pytest.mark.parametrize("wrong", [[], [1], [2, -1], [-1, -4, 1, 1, 1, 1], [1, 2, 3], [1, 1, 3, 4, 5, 6, 7]], ids=str)
def test_bad_tables_and_results_are_refused(wrong: list[int]) -> None:
    for read in (table_from, sampled_from):
        with pytest.raises(DeviceError, match="no whole message"):
            read(np.array(wrong, np.int32))


def test_the_largest_step_fits_into_what_is_set_aside() -> None:
    rows, tokens = LIMITS.max_rows, LIMITS.max_step_tokens
    line = StateLine(1, numbers(1, MAX_LOGIT_BIAS), floats(1, MAX_LOGIT_BIAS), numbers(1, VOCAB))
    of_sampling: dict[str, Any] = {
        one.name: (numbers if "I32" in str(one.type) else floats)(1, tokens)
        for one in fields(DeviceRows)
        if one.name not in ("masks", "num_late_masks", "joined")
    }
    sampling = DeviceRows(**of_sampling, masks=numbers(1, rows, 3), num_late_masks=0, joined=(line,) * rows)
    batch = Batch(
        input_ids=numbers(1, tokens),
        positions=numbers(1, tokens),
        slot_mapping=numbers(1, tokens),
        query_starts=numbers(1, rows + 1),
        context_lens=numbers(1, rows),
        block_tables=numbers(1, rows, LIMITS.max_blocks_per_row),
        logits_indices=numbers(1, tokens),
        feed_rows=numbers(1, tokens),
        sampling=sampling,
    )
    assert len(batch_bytes(batch)) == 4 * max_batch_words(LIMITS, VOCAB)
    sampled = Sampled(
        numbers(1, tokens), floats(1, tokens), numbers(1, tokens, MAX_LOGPROBS), floats(1, tokens, MAX_LOGPROBS)
    )
    assert len(sampled_bytes(sampled)) == 4 * max_sampled_words(LIMITS)

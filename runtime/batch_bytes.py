"""A step as one block of 32-bit words, and back: how rank 0 tells the other ranks what to run (per step).

header │ joined lines' headers │ tokens │ rows │ sampling │ masks │ joined lines' biases and counts
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.engines.errors import DeviceError
from ostinato.engines.sizes import MAX_LOGIT_BIAS, MAX_LOGPROBS, Limits
from ostinato.plugins.sampling_rows import F32, I32, Sampled

from .batch import Batch
from .device_rows import DeviceRows, StateLine

_MAGIC = 0x0571_0A70
_HEADER, _LINE_HEADER = 10, 3
_FLOATS = ("uniforms", "temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_INTEGERS = ("top_k", "state_rows", "mask_rows", "num_logprobs")
_NONE = -1  # the length of what is not there


def batch_bytes(batch: Batch) -> bytes:
    """The block. Sampling is in its device form."""
    rows = batch.sampling
    assert isinstance(rows, DeviceRows), "ranks sample on the device"
    (num_rows, width), (num_masks, mask_width) = batch.block_tables.shape, rows.masks.shape
    counts = [_MAGIC, batch.num_tokens, num_rows, width, batch.num_sampled, int(batch.feed_rows is not None)]
    counts += [num_masks, mask_width, rows.num_late_masks, len(rows.joined)]
    for line in rows.joined:
        assert (line.bias_ids is None) == (line.bias_values is None)
        counts += [line.line, *(_NONE if array is None else len(array) for array in (line.bias_ids, line.counts))]
    arrays: list[I32 | F32 | None] = [batch.input_ids, batch.positions, batch.slot_mapping, batch.feed_rows]
    arrays += [batch.query_starts, batch.context_lens, batch.block_tables, batch.logits_indices]
    arrays += [getattr(rows, name) for name in (*_FLOATS, *_INTEGERS)]
    arrays += [rows.masks]
    for line in rows.joined:
        arrays += [line.bias_ids, line.bias_values, line.counts]
    return _join(counts, *arrays)


def batch_from(words: I32) -> Batch:
    """The batch, whose arrays share the block's memory. Raises DeviceError for what is no whole batch."""
    reader = _Reader(words)
    magic, tokens, num_rows, width, sampled, feeds, num_masks, mask_width, late, joined = reader.counts(_HEADER)
    if magic != _MAGIC or feeds not in (0, 1) or late < 0 or not 0 <= joined <= reader.num_left:
        raise _no_message(words)
    heads = [reader.counts(_LINE_HEADER) for _ in range(joined)]
    input_ids, positions, slot_mapping = (reader.take(tokens) for _ in range(3))
    feed_rows = reader.take(tokens) if feeds else None
    query_starts, context_lens = reader.take(num_rows + 1), reader.take(num_rows)
    tables, logits_indices = reader.table(num_rows, width), reader.take(sampled)
    uniforms, temperature, top_p, min_p, repetition, presence, frequency = (
        reader.take(sampled).view(np.float32) for _ in _FLOATS
    )
    top_k, state_rows, mask_rows, num_logprobs = (reader.take(sampled) for _ in _INTEGERS)
    masks = reader.table(num_masks, mask_width)
    lines = tuple(_line(reader, *head) for head in heads)
    reader.end()
    rows = DeviceRows(
        uniforms, temperature, top_k, top_p, min_p, repetition, presence, frequency, state_rows, mask_rows,
        num_logprobs, masks, late, lines,
    )  # fmt: skip
    return Batch(
        input_ids, positions, slot_mapping, query_starts, context_lens, tables, logits_indices, feed_rows, rows
    )


def table_bytes(table: I32) -> bytes:
    """Masks, or anything else of two dimensions."""
    return _join(table.shape, table)


def table_from(words: I32) -> I32:
    """Raises DeviceError for what is no whole table."""
    reader = _Reader(words)
    table = reader.table(*reader.counts(2))
    reader.end()
    return table


def sampled_bytes(sampled: Sampled) -> bytes:
    """What a step gives, on its way back to rank 0."""
    return _join(sampled.top_ids.shape, sampled.tokens, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)


def sampled_from(words: I32) -> Sampled:
    """With memory of its own. Raises DeviceError for what is no whole result."""
    reader = _Reader(words.copy())
    lines, width = reader.counts(2)
    tokens, logprobs = reader.take(lines), reader.take(lines).view(np.float32)
    top_ids, top_logprobs = reader.table(lines, width), reader.table(lines, width).view(np.float32)
    reader.end()
    return Sampled(tokens, logprobs, top_ids, top_logprobs)


def max_batch_words(limits: Limits, vocab_size: int) -> int:
    """No batch within the limits takes more: every row is masked, and joins with all that a line may hold."""
    rows, mask_width = limits.max_rows, -(-vocab_size // 32)
    headers = _HEADER + _LINE_HEADER * rows
    of_tokens = limits.max_step_tokens * (4 + 1 + len(_FLOATS) + len(_INTEGERS))  # as if each were sampled
    of_rows = rows * (2 + limits.max_blocks_per_row) + 1
    return headers + of_tokens + of_rows + rows * mask_width + rows * (2 * MAX_LOGIT_BIAS + vocab_size)


def max_sampled_words(limits: Limits) -> int:
    """Nor any result."""
    return 2 + limits.max_step_tokens * (2 + 2 * MAX_LOGPROBS)


class _Reader:
    """Takes one array after another; nothing is taken that is not there."""

    def __init__(self, words: I32) -> None:
        self._words, self._at = words, 0

    @property
    def num_left(self) -> int:
        return len(self._words) - self._at

    def take(self, count: int) -> I32:
        start, self._at = self._at, self._at + count
        if count < 0 or self._at > len(self._words):
            raise _no_message(self._words)
        return self._words[start : self._at]

    def table(self, height: int, width: int) -> I32:
        if height < 0 or width < 0:
            raise _no_message(self._words)
        return self.take(height * width).reshape(height, width)

    def counts(self, count: int) -> list[int]:
        return [int(word) for word in self.take(count).tolist()]

    def end(self) -> None:
        if self.num_left:
            raise _no_message(self._words)


def _line(reader: _Reader, line: int, num_biases: int, num_counts: int) -> StateLine:
    bias_ids = bias_values = None
    if num_biases != _NONE:
        bias_ids, bias_values = reader.take(num_biases), reader.take(num_biases).view(np.float32)
    return StateLine(line, bias_ids, bias_values, None if num_counts == _NONE else reader.take(num_counts))


def _join(counts: Sequence[int], *arrays: I32 | F32 | None) -> bytes:
    """Numbers of four bytes, one after another."""
    whole = [
        array if array.flags.c_contiguous else np.ascontiguousarray(array) for array in arrays if array is not None
    ]
    assert all(array.itemsize == 4 for array in whole)
    return b"".join([np.array(counts, np.int32).data, *(array.data for array in whole)])


def _no_message(words: I32) -> DeviceError:
    return DeviceError(f"{len(words)} words from another rank are no whole message: ranks differ; restart the server")

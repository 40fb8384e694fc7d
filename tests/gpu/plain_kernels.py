"""The made-up rank's kernels for a real GPU, to the bit what `tests/sim/toy.py` computes, and one that does nothing."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def embed(input_ids, query_starts, slot_mapping, table, cache, hidden, rows: tl.constexpr, width: tl.constexpr):
    """A program a token: hidden = table[id] + cache[slot] / 2, kept in the cache; 0 for pads."""
    token = tl.program_id(0)
    column = tl.arange(0, width)
    if token < tl.load(query_starts + rows):
        line = tl.load(input_ids + token) * width + column
        place = tl.load(slot_mapping + token) * width + column
        value = tl.load(table + line) + 0.5 * tl.load(cache + place)
        tl.store(cache + place, value)
        tl.store(hidden + token * width + column, value)
    else:
        tl.store(hidden + token * width + column, tl.zeros([width], tl.float32))


@triton.jit
def weigh(hidden, scale, logits_indices, state_rows, counts, partial, vocab: tl.constexpr):
    """A program a row: the sum of 8 products in NumPy's order, plus all counts of its state line."""
    row = tl.program_id(0)
    line = hidden + tl.load(logits_indices + row) * 8
    low = (tl.load(line) * tl.load(scale) + tl.load(line + 1) * tl.load(scale + 1)) + (
        tl.load(line + 2) * tl.load(scale + 2) + tl.load(line + 3) * tl.load(scale + 3)
    )
    high = (tl.load(line + 4) * tl.load(scale + 4) + tl.load(line + 5) * tl.load(scale + 5)) + (
        tl.load(line + 6) * tl.load(scale + 6) + tl.load(line + 7) * tl.load(scale + 7)
    )
    seen = tl.sum(tl.load(counts + tl.load(state_rows + row) * vocab + tl.arange(0, vocab)))
    tl.store(partial + row, (low + high) + seen.to(tl.float32))


@triton.jit
def pick(
    partial, allowed, mask_rows, state_rows, counts, tokens, sums, vocab: tl.constexpr, words: tl.constexpr
):  # fmt: skip
    """A program a row: a token that follows from the sum; -1 where the row's mask forbids it."""
    row = tl.program_id(0)
    total = tl.load(partial + row)
    tl.store(sums + row, total)
    token = ((tl.abs(total) * 997.0).to(tl.int64) % vocab).to(tl.int32)
    mask = tl.load(mask_rows + row)
    if mask >= 0:
        word = tl.load(allowed + mask * words + token // 32)
        token = tl.where((word >> (token % 32)) & 1 != 0, token, -1)
    tl.store(tokens + row, token)
    state = tl.load(state_rows + row)
    if (state > 0) & (token >= 0):
        place = counts + state * vocab + token
        tl.store(place, tl.load(place) + 1)


@triton.jit
def nothing(out):
    """What a launch costs: one program, which stores nothing."""
    if tl.program_id(0) > 0:
        tl.store(out, 0)

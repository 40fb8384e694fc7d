"""Attention of rows with several new tokens: tiles of queries over the cached keys (per prefill step).

    tile     queries × the query heads of one KV head, cut from the row's own first token on: a row's result never
             depends on where in the step it stands
    program  (tile of the step, KV head); it finds its row on the device, from query_starts

Rows of one token belong to `decode_attention`, in every step: the same bits whoever the neighbours are.
Tiling is FlashAttention's (Dao 2023, arXiv:2307.08691). Launch rule: `paged_attention_launch.prefill_launch`.
Oracle: `paged_attention.paged_attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tile import attend


@triton.jit
def prefill_attention(
    q, key_cache, value_cache, query_starts, context_lens, block_tables, out,
    rows: tl.constexpr, rows_pad: tl.constexpr, num_kv_heads: tl.constexpr, group: tl.constexpr,
    head_size: tl.constexpr, head_pad: tl.constexpr, block_size: tl.constexpr, table_width: tl.constexpr,
    cache_dtype: tl.constexpr, scale: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr,
    lines: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """`lines` // group tokens of one row with one KV head's query heads, over `tile` keys at a time."""
    tokens: tl.constexpr = lines // group
    row, piece = find_row(query_starts, tl.program_id(0), rows, rows_pad, tokens)
    kv_head = tl.program_id(1)
    row_start = tl.load(query_starts + row)
    new = tl.load(query_starts + row + 1) - row_start
    begin = piece * tokens
    if (new == 1) | (begin >= new):
        return
    cached = tl.load(context_lens + row)
    end = cached + tl.minimum(begin + tokens, new)

    line, dim = tl.arange(0, lines), tl.arange(0, head_pad)
    token = begin + line // group
    at = ((row_start + token) * num_kv_heads * group + kv_head * group + line % group)[:, None] * head_size
    inside = ((line < tokens * group) & (token < new))[:, None] & (dim < head_size)[None, :]
    queries = tl.load(q + at + dim[None, :], mask=inside, other=0.0)
    best = tl.full([lines], float("-inf"), tl.float32)
    weight = tl.zeros([lines], tl.float32)
    total = tl.zeros([lines, head_pad], tl.float32)
    last = (cached + token)[:, None]  # the key that a query stands at
    first = tl.maximum(cached + begin - window + 1, 0) if window else 0
    table = block_tables + row * table_width
    for start in range(first // tile * tile, end, tile):
        key = start + tl.arange(0, tile)
        visible = key[None, :] <= last
        if window:
            visible &= key[None, :] > last - window
        best, weight, total = attend(
            queries, best, weight, total, key_cache, value_cache, table, kv_head, key, (key >= first) & (key < end),
            visible, num_kv_heads, head_size, block_size, cache_dtype, scale, softcap, window > 0,
        )  # fmt: skip
    tl.store(out + at + dim[None, :], (total / weight[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def find_row(query_starts, index, rows: tl.constexpr, rows_pad: tl.constexpr, tokens: tl.constexpr):
    """(row, tile within the row) of the step's tile `index`.

    Row b's tiles begin at query_starts[b] // tokens + b: room for all of them, at most one number left free.
    """
    row = tl.arange(0, rows_pad)
    begins = tl.load(query_starts + row, mask=row < rows, other=0) // tokens + row
    found = tl.sum(((row < rows) & (begins <= index)).to(tl.int32), 0) - 1
    return found, index - tl.load(query_starts + found) // tokens - found

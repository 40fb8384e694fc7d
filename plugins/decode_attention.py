"""Attention of rows with one new token: the context is cut into splits, and a second kernel joins them (per step).

    keys   first ───────── split ───────── 2·split ──── at      a split is as long as the row's own keys ask for:
             program 0         program 1         program 2      short rows use many programs too, and a row's result
             (best, weight, total) each ─▶ join, in order       never depends on its neighbours

Rows of more tokens, and pads, are left alone (`prefill_attention`). Splitting is Flash-Decoding's (Dao et al. 2023).
Launch rules: `paged_attention_launch.decode_launches`. Oracle: `paged_attention.paged_attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tile import attend


@triton.jit
def decode_splits(
    q, key_cache, value_cache, query_starts, context_lens, block_tables, split_best, split_weight, split_total,
    num_kv_heads: tl.constexpr, group: tl.constexpr, group_pad: tl.constexpr, head_size: tl.constexpr,
    head_pad: tl.constexpr, block_size: tl.constexpr, table_width: tl.constexpr, cache_dtype: tl.constexpr,
    scale: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr, num_splits: tl.constexpr,
    min_split: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """One row, one KV head with its `group` query heads: one split, or every n-th where n programs share the row's."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts + row)
    if tl.load(query_starts + row + 1) - token != 1:
        return
    first, end, base, split = cut(tl.load(context_lens + row), window, num_splits, min_split, tile)
    pieces = tl.cdiv(end - base, split)
    if tl.program_id(2) >= pieces:
        return

    member = tl.arange(0, group_pad)
    dim = tl.arange(0, head_pad)
    inside = (member < group)[:, None] & (dim < head_size)[None, :]
    head = kv_head * group + member
    num_q_heads: tl.constexpr = num_kv_heads * group
    queries = tl.load(q + (token * num_q_heads + head)[:, None] * head_size + dim[None, :], mask=inside, other=0.0)
    table = block_tables + row * table_width
    for piece in range(tl.program_id(2), pieces, tl.num_programs(2)):
        best = tl.full([group_pad], float("-inf"), tl.float32)
        weight = tl.zeros([group_pad], tl.float32)
        total = tl.zeros([group_pad, head_pad], tl.float32)
        begin = base + piece * split
        for start in range(begin, tl.minimum(end, begin + split), tile):
            key = start + tl.arange(0, tile)
            stored = (key >= first) & (key < end)
            best, weight, total = attend(
                queries, best, weight, total, key_cache, value_cache, table, kv_head, key, stored, stored[None, :],
                num_kv_heads, head_size, block_size, cache_dtype, scale, softcap, False,
            )  # fmt: skip
        at = (row * num_q_heads + head) * num_splits + piece
        tl.store(split_best + at, best, mask=member < group)
        tl.store(split_weight + at, weight, mask=member < group)
        tl.store(split_total + at.to(tl.int64)[:, None] * head_size + dim[None, :], total, mask=inside)


@triton.jit
def decode_join(
    query_starts, context_lens, split_best, split_weight, split_total, out,
    num_splits: tl.constexpr, splits_pad: tl.constexpr, head_size: tl.constexpr, head_pad: tl.constexpr,
    window: tl.constexpr, min_split: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """One row and query head: its splits side by side, summed in an order that only `num_splits` fixes."""
    row, head, num_q_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = tl.load(query_starts + row)
    if tl.load(query_starts + row + 1) - token != 1:
        return
    _, end, base, split = cut(tl.load(context_lens + row), window, num_splits, min_split, tile)
    piece = tl.arange(0, splits_pad)
    dim = tl.arange(0, head_pad)
    used = base + piece * split < end
    inside = used[:, None] & (dim < head_size)[None, :]
    at = (row * num_q_heads + head) * num_splits + piece
    best = tl.load(split_best + at, mask=used, other=float("-inf"))
    weight = tl.load(split_weight + at, mask=used, other=0.0)
    total = tl.load(split_total + at.to(tl.int64)[:, None] * head_size + dim[None, :], mask=inside, other=0.0)
    fade = tl.exp2(best - tl.max(best, 0))
    result = tl.sum(total * fade[:, None], 0) / tl.sum(weight * fade, 0)
    tl.store(
        out + (token * num_q_heads + head) * head_size + dim, result.to(out.dtype.element_ty), mask=dim < head_size
    )


@triton.jit
def cut(
    cached, window: tl.constexpr, num_splits: tl.constexpr, min_split: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """A row's keys: (first seen, end, where the first split begins, a split's length); bounds are whole tiles."""
    end = cached + 1
    first = tl.maximum(end - window, 0) if window else 0
    base = first // tile * tile
    split = tl.maximum(tl.cdiv(end - base, num_splits * tile) * tile, min_split)
    return first, end, base, split

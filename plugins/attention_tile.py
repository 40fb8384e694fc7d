"""One tile of attention over a paged cache: what decode and prefill repeat for every run of keys (per step).

A tile holds queries [M, D], and for each the largest score so far, the sum of weights and the weighted values
(online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867). Scores are in powers of two. Keys are found one by one
through the block table, so a tile may span many small blocks or stand inside a large one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cache_codes import from_codes, from_scales, scale_pointers

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q, best, weight, total, key_cache, value_cache, table, kv_head, key, stored, visible,
    num_kv_heads: tl.constexpr, head_size: tl.constexpr, block_size: tl.constexpr, cache_dtype: tl.constexpr,
    scale: tl.constexpr, softcap: tl.constexpr, may_see_none: tl.constexpr,
):  # fmt: skip
    """(best, weight, total) after the keys at positions `key` [n]; `stored` [n] may be read, `visible` [M, n] are seen.

    `may_see_none`: a query may have seen no key yet. Nothing is read where `stored` is false.
    """
    block = tl.load(table + key // block_size, mask=stored, other=0).to(tl.int64)
    group = block * num_kv_heads + kv_head
    offset = key % block_size
    codes, key_scales = _load(key_cache, group, offset, stored, q, head_size, block_size, cache_dtype)
    scores = tl.dot(q, tl.trans(codes), input_precision="ieee")
    if cache_dtype != "plain":
        scores *= key_scales[None, :]
    if softcap > 0:
        scores = _tanh(scores * (scale / softcap)) * (softcap * LOG2_E)
    else:
        scores *= scale * LOG2_E
    scores = tl.where(visible, scores, float("-inf"))

    new_best = tl.maximum(best, tl.max(scores, 1))
    origin = tl.where(new_best == float("-inf"), 0.0, new_best) if may_see_none else new_best
    weights = tl.exp2(scores - origin[:, None])
    fade = tl.exp2(best - origin)
    weight = weight * fade + tl.sum(weights, 1)
    total *= fade[:, None]
    values, value_scales = _load(value_cache, group, offset, stored, q, head_size, block_size, cache_dtype)
    if cache_dtype == "plain":
        total += tl.dot(weights.to(q.dtype), values, input_precision="ieee")
    else:
        # A scale times a weight may be too small for a half: keep the tile's largest scale apart.
        largest = tl.maximum(tl.max(value_scales, 0), 1e-37)
        weights *= (value_scales / largest)[None, :]
        total += tl.dot(weights.to(q.dtype), values, input_precision="ieee") * largest
    return new_best, weight, total


@triton.jit
def _load(
    cache, group, offset, stored, q,
    head_size: tl.constexpr, block_size: tl.constexpr, cache_dtype: tl.constexpr,
):  # fmt: skip
    """Numbers [n, D] in q's dtype, and scales [n] (of a plain cache, unused zeros), of one (block, head) a key."""
    dim = tl.arange(0, q.shape[1])
    inside = stored[:, None] & (dim < head_size)[None, :]
    if cache_dtype == "plain":
        at = (group * block_size + offset) * head_size
        numbers = tl.load(cache + at[:, None] + dim[None, :], mask=inside, other=0.0)
        scales = tl.zeros(offset.shape, tl.float32)
    else:
        at = group * (block_size * (head_size + 4))
        codes = tl.load(cache + (at + offset * head_size)[:, None] + dim[None, :], mask=inside, other=0)
        numbers = from_codes(codes, cache_dtype, q.dtype)
        stored_scales = tl.load(scale_pointers(cache, at + block_size * head_size + offset * 4), mask=stored, other=0.0)
        scales = from_scales(stored_scales, cache_dtype)
    return numbers, scales


@triton.jit
def _tanh(x):
    """From exp2 of a number that is not positive: nothing overflows. Near 0, where that cancels, by its series."""
    shrunk = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    size = (1 - shrunk) / (1 + shrunk)
    square = x * x
    near = x * (1 - square * (1 / 3 - square * (2 / 15)))
    return tl.where(square < 0.01, near, tl.where(x < 0, -size, size))

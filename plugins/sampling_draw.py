"""StatefulSampling's fourth kernel: where truncation cuts, and the draw (per step, on the GPU).

One program a row. The cut is the greatest rank t for which the tokens from t up are enough: k of them, or p of the
mass. It is found by halving an interval of ranks, whose ends snap to candidates, per pass over them; no row is sorted.
The draw walks the kept tokens in vocabulary order. Masses are integers, so every sum is exact and in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_rank import NOTHING, group_ranks, id_of, is_allowed, is_error, mass_of, rank_of, value_of
from .sampling_weigh import ARGMAX_BELOW, NO_SEARCH, min_p_rank


@triton.jit
def draw_tokens(
    state_rows, mask_rows, allowed, uniforms, temperature, top_k, top_p, min_p, adjusted, best_any, best_legal,
    masses, sizes, bounds, candidates, tokens,
    vocab_size: tl.constexpr, block: tl.constexpr, num_blocks: tl.constexpr, padded_blocks: tl.constexpr,
    num_groups: tl.constexpr, padded_groups: tl.constexpr, words: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """tokens [S]: -1 for a pad and for a row in error."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.full((), -1, tl.int32)
    if tl.load(state_rows + row) > 0:
        greatest = tl.max(group_ranks(best_any, row, num_groups, padded_groups))
        best = tl.max(group_ranks(best_legal, row, num_groups, padded_groups))
        heat, k = tl.load(temperature + row), tl.load(top_k + row)
        if not is_error(greatest, best):
            token = id_of(best)
            if (k != 1) & (heat >= ARGMAX_BELOW):
                values = adjusted + row * vocab_size
                uniform, bound = tl.load(uniforms + row).to(tl.float64), tl.load(bounds + row)
                parts = tl.arange(0, padded_blocks)
                whole = tl.load(masses + row * num_blocks + parts, mask=parts < num_blocks, other=0)
                if bound == NO_SEARCH:
                    mask_row = tl.load(mask_rows + row)
                    token = _draw_any(values, whole, uniform, value_of(best), heat, mask_row, allowed,
                                      vocab_size, block, words)  # fmt: skip
                else:
                    line = candidates + row * vocab_size
                    count = tl.sum(tl.load(sizes + row * num_blocks + parts, mask=parts < num_blocks, other=0))
                    k = tl.where(k < vocab_size, k, 0)
                    p, least = tl.load(top_p + row).to(tl.float64), tl.load(min_p + row).to(tl.float64)
                    cut = _cut(line, values, count, bound, best, heat, k, p, least, tl.sum(whole), chunk)
                    token = _draw_kept(line, values, count, cut, uniform, value_of(best), heat, chunk)
    tl.store(tokens + row, token)


@triton.jit
def _draw_any(
    values, whole, uniform, best, heat, mask_row, allowed,
    vocab_size: tl.constexpr, block: tl.constexpr, words: tl.constexpr,
):  # fmt: skip
    """Of all legal tokens: the block where the running mass passes the target, then the token in it."""
    target = (uniform * tl.sum(whole).to(tl.float64)).to(tl.int64)
    running = tl.cumsum(whole, axis=0)
    part = tl.sum((running <= target).to(tl.int32))
    before = tl.sum(tl.where(running <= target, whole, 0))
    tokens = part * block + tl.arange(0, block)
    live = tokens < vocab_size
    value = tl.load(values + tokens, mask=live, other=float("-inf"))
    legal = is_allowed(allowed, mask_row, tokens, live, words)
    mass = tl.where(legal, mass_of(value, best, heat), 0)
    return part * block + tl.sum((before + tl.cumsum(mass, axis=0) <= target).to(tl.int32))


@triton.jit
def _draw_kept(line, values, count, cut, uniform, best, heat, chunk: tl.constexpr):
    """Of the candidates from rank `cut` up, which stand in vocabulary order."""
    target = (uniform * _mass_from(line, values, count, cut, best, heat, chunk).to(tl.float64)).to(tl.int64)
    token, before, start = tl.full((), -1, tl.int32), tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    while (token < 0) & (start < count):
        ids, ranks, value = _candidates(line, values, start, count, chunk)
        mass = tl.where(ranks >= cut, mass_of(value, best, heat), 0)
        running = before + tl.cumsum(mass, axis=0)
        first = tl.min(tl.where((mass > 0) & (running > target), ids, 0x7FFFFFFF))
        token = tl.where(first < 0x7FFFFFFF, first, token)
        before += tl.sum(mass)
        start += chunk
    return token


@triton.jit
def _cut(line, values, count, bound, best, heat, k, p, min_p, whole, chunk: tl.constexpr):
    """The least rank that is kept: top-k, then top-p of what it kept, then min-p. k 0 is off."""
    cut, top = bound, value_of(best)
    if (k > 0) & (count > k):
        cut = _narrow(line, values, count, cut, best + 1, k.to(tl.int64), top, heat, False, chunk)
    if p < 1.0:
        kept = _mass_from(line, values, count, cut, top, heat, chunk)
        share = p * tl.where(k > 0, kept, whole).to(tl.float64)
        target = share.to(tl.int64)
        target = tl.maximum(tl.where(target.to(tl.float64) < share, target + 1, target), 1)
        if kept >= target:
            cut = _narrow(line, values, count, cut, best + 1, target, top, heat, True, chunk)
    if min_p > 0.0:
        cut = tl.maximum(cut, min_p_rank(best, heat, min_p))
    return cut


@triton.jit
def _narrow(line, values, count, low, high, target, best, heat, by_mass: tl.constexpr, chunk: tl.constexpr):
    """The greatest rank of a candidate from which they amount to `target` up; from `low` they do, from `high` not."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        amount = tl.full((), 0, tl.int64)
        above, below = high, low  # the candidates next to the middle
        for start in range(0, count, chunk):
            _, ranks, value = _candidates(line, values, start, count, chunk)
            is_above = ranks >= middle
            if by_mass:
                amount += tl.sum(tl.where(is_above, mass_of(value, best, heat), 0))
            else:
                amount += tl.sum(is_above.to(tl.int64))
            above = tl.minimum(above, tl.min(tl.where(is_above, ranks, high)))
            below = tl.maximum(below, tl.max(tl.where(is_above, low, ranks)))
        if amount >= target:
            low = above
        else:
            high = below + 1
    return low


@triton.jit
def _mass_from(line, values, count, cut, best, heat, chunk: tl.constexpr):
    """The mass of the candidates from rank `cut` up."""
    mass = tl.full((), 0, tl.int64)
    for start in range(0, count, chunk):
        _, ranks, value = _candidates(line, values, start, count, chunk)
        mass += tl.sum(tl.where(ranks >= cut, mass_of(value, best, heat), 0))
    return mass


@triton.jit
def _candidates(line, values, start, count, chunk: tl.constexpr):
    """Ids, ranks and logits of the candidates from `start` on; past the end the rank NOTHING."""
    at = start + tl.arange(0, chunk)
    live = at < count
    ids = tl.load(line + at, mask=live, other=0)
    value = tl.load(values + ids, mask=live, other=float("-inf"))
    return ids, tl.where(live, rank_of(value, ids), NOTHING), value

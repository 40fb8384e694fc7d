"""StatefulSampling's second and third kernels: masses per block, and the few tokens that truncation may keep, packed.

Both run one program a row and block of the vocabulary (per step, on the GPU). For a row that truncates, a lower bound
of what it keeps is known before any search: its k best groups hold k tokens that reach the least of those groups'
bests; top-p never cuts a token that alone weighs more than (1 - p) / V, since all up to V tokens under it would have
to; and min-p is a bound itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fused_sampling import GREEDY_BELOW
from .sampling_rank import (
    LOWEST,
    NOTHING,
    group_ranks,
    is_allowed,
    is_error,
    mass_of,
    rank_of,
    rank_reaching,
    value_of,
)

ARGMAX_BELOW = tl.constexpr(GREEDY_BELOW)
NO_SEARCH = tl.constexpr(1 << 62)  # the bound of a row that keeps nothing, one token, or everything
BOUND_GRAIN = tl.constexpr(1 << 32)  # of the k-th best group's rank: 2^12 steps of f32
MARGIN = tl.constexpr(0.5)  # of top-p's bound, far above f32 rounding


@triton.jit
def weigh_blocks(
    state_rows, mask_rows, allowed, temperature, top_k, top_p, min_p, num_logprobs, adjusted, best_any, best_legal,
    masses, sums, sizes, bounds,
    vocab_size: tl.constexpr, block: tl.constexpr, num_blocks: tl.constexpr, num_groups: tl.constexpr,
    padded_groups: tl.constexpr, words: tl.constexpr,
):  # fmt: skip
    """Per block: the legal tokens' mass, sum of exp(logit - greatest) of all tokens, and how many reach the bound."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(state_rows + row) <= 0:
        return
    legal_groups = group_ranks(best_legal, row, num_groups, padded_groups)
    greatest, best = tl.max(group_ranks(best_any, row, num_groups, padded_groups)), tl.max(legal_groups)
    heat = tl.load(temperature + row)
    is_greedy = (tl.load(top_k + row) == 1) | (heat < ARGMAX_BELOW)
    bound = tl.full((), NO_SEARCH, tl.int64)
    if not is_error(greatest, best):
        tokens = part * block + tl.arange(0, block)
        live = tokens < vocab_size
        value = tl.load(adjusted + row * vocab_size + tokens, mask=live, other=float("-inf"))
        if tl.load(num_logprobs + row) >= 0:
            tl.store(sums + row * num_blocks + part, tl.sum(tl.exp(value - value_of(greatest))))
        if not is_greedy:
            legal = is_allowed(allowed, tl.load(mask_rows + row), tokens, live, words)
            mass = tl.where(legal, mass_of(value, value_of(best), heat), 0)
            tl.store(masses + row * num_blocks + part, tl.sum(mass))
            bound = _bound(legal_groups, best, heat, tl.load(top_k + row), tl.load(top_p + row).to(tl.float64),
                           tl.load(min_p + row).to(tl.float64), vocab_size)  # fmt: skip
            reaching = legal & (rank_of(value, tokens) >= bound)
            tl.store(sizes + row * num_blocks + part, tl.sum(reaching.to(tl.int32)))
    if part == 0:
        tl.store(bounds + row, bound)


@triton.jit
def _bound(groups, best, heat, top_k, top_p, min_p, vocab_size: tl.constexpr):
    """A rank that every kept token reaches. What top-k keeps below min-p still counts as top-p's whole."""
    is_k, is_p = (top_k > 0) & (top_k < vocab_size), top_p < 1.0
    bound = tl.full((), NO_SEARCH, tl.int64)
    if is_k | is_p | (min_p > 0.0):
        bound = tl.full((), LOWEST, tl.int64)
        if is_k:
            bound = _kth_best(groups, best, top_k)
        if is_p & (not is_k):
            share = (1.0 - top_p) * MARGIN / vocab_size
            bound = tl.maximum(bound, rank_reaching(value_of(best).to(tl.float64) + heat * tl.log(share)))
        if (min_p > 0.0) & (not (is_k & is_p)):
            bound = tl.maximum(bound, min_p_rank(best, heat, min_p))
    return bound


@triton.jit
def min_p_rank(best, heat, min_p):
    """The least rank of a weight that reaches `min_p`; the best token always does."""
    return tl.minimum(rank_reaching(value_of(best).to(tl.float64) + heat * tl.log(min_p)), best)


@triton.jit
def _kth_best(groups, best, k):
    """At most the k-th best of the groups' ranks, within a grain; LOWEST where fewer groups have a token."""
    low, high = tl.full((), LOWEST, tl.int64), best + 1
    if tl.sum((groups >= low).to(tl.int32)) >= k:
        while high - low > BOUND_GRAIN:
            middle = low + ((high - low) >> 1)
            if tl.sum((groups >= middle).to(tl.int32)) >= k:
                low = middle
            else:
                high = middle
    return low


@triton.jit
def pack_candidates(
    state_rows, mask_rows, allowed, adjusted, sizes, bounds, candidates,
    vocab_size: tl.constexpr, block: tl.constexpr, num_blocks: tl.constexpr, padded_blocks: tl.constexpr,
    words: tl.constexpr,
):  # fmt: skip
    """Ids of the legal tokens that reach the row's bound, ascending, at the front of `candidates` [S, V]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(state_rows + row) <= 0:
        return
    bound = tl.load(bounds + row)
    if bound == NO_SEARCH:
        return
    tokens = part * block + tl.arange(0, block)
    live = tokens < vocab_size
    value = tl.load(adjusted + row * vocab_size + tokens, mask=live, other=0.0)
    legal = is_allowed(allowed, tl.load(mask_rows + row), tokens, live, words)
    reaching = tl.where(legal, rank_of(value, tokens), NOTHING) >= bound
    parts = tl.arange(0, padded_blocks)
    before = tl.sum(tl.load(sizes + row * num_blocks + parts, mask=parts < part, other=0))
    place = before + tl.cumsum(reaching.to(tl.int32), axis=0) - 1
    tl.store(candidates + row * vocab_size + place, tokens, mask=reaching)

"""What the sampling kernels share: a token's rank as one integer, its mass as another (per step, on the GPU).

rank: int64, order-preserving bits of the f32 logit above, the complement of the id below, so that comparing ranks is
the strict order "logit, then lower id", and a threshold on ranks needs no care for ties. NaN ranks above infinity.

mass: int64, the weight exp((logit - best) / temperature), at most 1, in units of 2^-42, so that sums are exact in any
order. A weight that float64 would tell from 0 is at least one unit: a vocabulary of 2^18 such units is no more than the
least uniform's share, which is 2^-24 of the mass.
"""

from __future__ import annotations

import triton
import triton.language as tl

ID_BITS = tl.constexpr(20)  # ids are under 2^20
LAST_ID = tl.constexpr((1 << 20) - 1)
INFINITE = tl.constexpr(0x7F800000 << 20)  # the least rank of +inf; NaNs are above
LOWEST = tl.constexpr(-0x7F800000 << 20)  # the least rank above those of -inf
NOTHING = tl.constexpr(-(1 << 62))  # ranks below every token: masked, or past the end
HALF_UNIT = tl.constexpr(float(1 << 21))  # a unit of mass, by halves of its bits
HALF_BITS = tl.constexpr(21)
VANISHED = tl.constexpr(-745.13)  # under it, exp is 0 in float64
WORD_BITS = tl.constexpr(5)  # a mask word holds 2^5 tokens


@triton.jit
def key_of(value):
    """Order-preserving int32 of f32: both zeros 0, NaN the greatest."""
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(value == 0.0, 0, key)
    return tl.where(value != value, 0x7FFFFFFF, key)


@triton.jit
def rank_of(value, token):
    return (key_of(value).to(tl.int64) << ID_BITS) + (token ^ LAST_ID)


@triton.jit
def value_of(rank):
    key = (rank >> ID_BITS).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def id_of(rank):
    return ((rank & LAST_ID) ^ LAST_ID).to(tl.int32)


@triton.jit
def rank_reaching(cut):
    """The least rank of a logit at or above `cut`, a float64, that is not -inf."""
    near = cut.to(tl.float32)
    key = key_of(near).to(tl.int64)
    key = tl.where(near.to(tl.float64) < cut, key + 1, key)
    return tl.maximum(key << ID_BITS, LOWEST)


@triton.jit
def mass_of(value, best, temperature):
    """`value` must not exceed `best`, the greatest legal logit."""
    exponent = (value - best) / temperature
    weight = tl.exp(exponent) * HALF_UNIT
    whole = weight.to(tl.int32)
    rest = ((weight - whole.to(tl.float32)) * HALF_UNIT).to(tl.int32)
    mass = (whole.to(tl.int64) << HALF_BITS) + rest
    return tl.where(exponent > VANISHED, tl.maximum(mass, 1), 0)


@triton.jit
def is_allowed(allowed, mask_row, tokens, live, words: tl.constexpr):
    """Flags of `tokens` in line `mask_row` of `allowed` [S, words]; -1 allows every live one."""
    flags = live
    if mask_row >= 0:
        word = tl.load(allowed + mask_row.to(tl.int64) * words + (tokens >> WORD_BITS), mask=live, other=0)
        flags = live & (((word >> (tokens & 31)) & 1) != 0)
    return flags


@triton.jit
def group_ranks(ranks, row, num_groups: tl.constexpr, padded: tl.constexpr):
    """A row's best rank per group [padded]."""
    at = tl.arange(0, padded)
    return tl.load(ranks + row * num_groups + at, mask=at < num_groups, other=NOTHING)


@triton.jit
def is_error(greatest, best):
    """Whether a row has no token to give: its greatest logit is not finite, or no legal one is."""
    return (greatest >= INFINITE) | (best < LOWEST)

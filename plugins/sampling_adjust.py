"""StatefulSampling's first kernel: bias, penalties, and the best token of every group (per step, on the GPU).

One program a row and block of the vocabulary. Every step is one f32 operation, rounded as the oracle rounds it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.engines.io_table import IN_PROMPT

from .sampling_rank import NOTHING, is_allowed, rank_of

OUTPUT_BITS = tl.constexpr(IN_PROMPT - 1)


@triton.jit
def adjust_logits(
    logits, state_rows, mask_rows, allowed, repetition, presence, frequency, bias_ids, bias_values, counts,
    adjusted, best_any, best_legal,
    vocab_size: tl.constexpr, block: tl.constexpr, group: tl.constexpr, num_groups: tl.constexpr,
    words: tl.constexpr, max_bias: tl.constexpr, padded_bias: tl.constexpr,
):  # fmt: skip
    """logits [S, V] → adjusted [S, V] f32, and the best rank of each group of tokens, of all and of legal ones."""
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(state_rows + row).to(tl.int64)
    if line <= 0:
        return
    first = tl.program_id(1) * block
    tokens = first + tl.arange(0, block)
    live = tokens < vocab_size
    value = tl.load(logits + row * vocab_size + tokens, mask=live, other=0.0).to(tl.float32)
    if max_bias > 0:
        value = _biased(value, tokens, first, bias_ids + line * max_bias, bias_values + line * max_bias,
                        block, max_bias, padded_bias)  # fmt: skip
    by_repetition, by_presence = tl.load(repetition + row), tl.load(presence + row)
    by_frequency = tl.load(frequency + row)
    if (by_repetition != 1.0) | (by_presence != 0.0) | (by_frequency != 0.0):
        seen = tl.load(counts + line * vocab_size + tokens, mask=live, other=0)
        in_output = (seen & OUTPUT_BITS).to(tl.float32)
        weakened = tl.where(value > 0.0, tl.div_rn(value, by_repetition), _product(value, by_repetition))
        value = tl.where(seen > 0, weakened, value)
        value = value - tl.where(in_output > 0.0, by_presence, 0.0)
        value = value - _product(in_output, by_frequency)
    tl.store(adjusted + row * vocab_size + tokens, value, mask=live)

    ranks = tl.where(live, rank_of(value, tokens), NOTHING)
    legal = tl.where(is_allowed(allowed, tl.load(mask_rows + row), tokens, live, words), ranks, NOTHING)
    groups = tl.program_id(1) * (block // group) + tl.arange(0, block // group)
    of_any = tl.max(tl.reshape(ranks, [block // group, group]), axis=1)
    of_legal = tl.max(tl.reshape(legal, [block // group, group]), axis=1)
    tl.store(best_any + row * num_groups + groups, of_any)
    tl.store(best_legal + row * num_groups + groups, of_legal)


@triton.jit
def _biased(value, tokens, first, ids, biases, block: tl.constexpr, max_bias: tl.constexpr, padded: tl.constexpr):
    """Adds the entries of this block, which stand together because ids ascend."""
    at = tl.arange(0, padded)
    entries = tl.load(ids + at, mask=at < max_bias, other=0x7FFFFFFF)
    begin = tl.sum((entries < first).to(tl.int32))
    end = tl.sum((entries < first + block).to(tl.int32))
    for entry in range(begin, end):
        value = tl.where(tokens == tl.load(ids + entry), value + tl.load(biases + entry), value)
    return value


@triton.jit
def _product(left, right):
    """left * right rounded to f32 whatever follows: a bare product may be fused with a later subtraction."""
    return tl.fma(left, right, tl.zeros_like(left))

"""StatefulSampling's last kernel: reported logprobs, and the token's count (per step, on the GPU).

One program a row. The k best come one at a time: the best group's best token, after which only that group is read
again, for its next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_rank import NOTHING, group_ranks, id_of, rank_of, value_of


@triton.jit
def report_logprobs(
    state_rows, num_logprobs, tokens, adjusted, best_any, sums, logprobs, top_ids, top_logprobs, counts_out,
    vocab_size: tl.constexpr, num_blocks: tl.constexpr, padded_blocks: tl.constexpr, group: tl.constexpr,
    num_groups: tl.constexpr, padded_groups: tl.constexpr, num_slots: tl.constexpr, padded_slots: tl.constexpr,
):  # fmt: skip
    """logprobs [S], top_ids and top_logprobs [S, K]; adds 1 to counts_out [R, V] at the row's line and token."""
    row = tl.program_id(0).to(tl.int64)
    line, token = tl.load(state_rows + row).to(tl.int64), tl.load(tokens + row)
    asked = tl.minimum(tl.load(num_logprobs + row), min(num_slots, vocab_size))
    asked = tl.where(line > 0, asked, -1)
    if num_slots > 0:
        at = tl.arange(0, padded_slots)
        is_blank = (at < num_slots) & (at >= tl.where(token < 0, 0, asked))
        blank = tl.where(at < asked, float("-inf"), float("nan"))
        tl.store(top_ids + row * num_slots + at, tl.full([padded_slots], -1, tl.int32), mask=is_blank)
        tl.store(top_logprobs + row * num_slots + at, blank, mask=is_blank)
    logprob = tl.where(asked >= 0, float("-inf"), float("nan"))
    if (line > 0) & (token >= 0):
        tl.atomic_add(counts_out + line * vocab_size + token, 1)
        if asked >= 0:
            values = adjusted + row * vocab_size
            groups = group_ranks(best_any, row, num_groups, padded_groups)
            parts = tl.arange(0, padded_blocks)
            total = tl.sum(tl.load(sums + row * num_blocks + parts, mask=parts < num_blocks, other=0.0).to(tl.float64))
            greatest, log_total = value_of(tl.max(groups)).to(tl.float64), tl.log(total)
            logprob = _logprob(tl.load(values + token), greatest, log_total)
            if num_slots > 0:
                _report_best(values, groups, asked, greatest, log_total, top_ids + row * num_slots,
                             top_logprobs + row * num_slots, vocab_size, group, padded_groups)  # fmt: skip
    tl.store(logprobs + row, logprob)


@triton.jit
def _report_best(
    values, groups, asked, greatest, log_total, ids, logprobs,
    vocab_size: tl.constexpr, group: tl.constexpr, padded_groups: tl.constexpr,
):  # fmt: skip
    """Fills the first `asked` slots with the best tokens in strict order."""
    for slot in range(0, asked):
        best = tl.max(groups)
        token = id_of(best)
        tl.store(ids + slot, token)
        tl.store(logprobs + slot, _logprob(value_of(best), greatest, log_total))
        home = token // group
        tokens = home * group + tl.arange(0, group)
        live = tokens < vocab_size
        ranks = rank_of(tl.load(values + tokens, mask=live, other=0.0), tokens)
        following = tl.max(tl.where(live & (ranks < best), ranks, NOTHING))
        groups = tl.where(tl.arange(0, padded_groups) == home, following, groups)


@triton.jit
def _logprob(value, greatest, log_total):
    """In this order: a sum of a huge logit and the total's logarithm would be the logit."""
    return ((value.to(tl.float64) - greatest) - log_total).to(tl.float32)

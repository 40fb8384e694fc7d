"""What the CPU's plugin sees of a batch: its shapes padded to buckets, all pads in the null block (made per step)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ostinato.engines.sizes import Limits, bucket_for
from ostinato.plugins.sampling_rows import I32

from .batch import Batch


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """Step inputs whose sizes are buckets, named as in `engines.io_table`; the plugin takes slots from rows.

    A pad row is one token at position 0 of block 0 with context 0. Tokens past the last row's belong to no row; they
    too are at position 0. A pad among the sampled rows reads token 0.
    """

    input_ids: I32  # [T]
    positions: I32  # [T]
    query_starts: I32  # [B+1]
    context_lens: I32  # [B]
    block_tables: I32  # [B, P]
    logits_indices: I32  # [S]


def pad_tokens(limits: Limits) -> tuple[int, ...]:
    """By number of rows: the pad rows up to the bucket, one token each."""
    return tuple(bucket_for(count, limits.row_buckets) - count for count in range(limits.max_rows + 1))


def computed_tokens(limits: Limits, num_rows: int, num_tokens: int, num_sampled: int) -> int:
    """The smallest bucket that holds the step and its pad rows; `num_sampled` does not count."""
    return bucket_for(num_tokens + bucket_for(num_rows, limits.row_buckets) - num_rows, limits.token_buckets)


def padded(batch: Batch, limits: Limits) -> PaddedStep:
    """The batch in the smallest buckets that hold it."""
    num_rows = bucket_for(batch.num_rows, limits.row_buckets)
    num_pads = num_rows - batch.num_rows
    num_tokens = computed_tokens(limits, batch.num_rows, batch.num_tokens, batch.num_sampled)
    ends = batch.query_starts[-1] + np.arange(1, num_pads + 1, dtype=np.int32)
    return PaddedStep(
        input_ids=_longer(batch.input_ids, num_tokens),
        positions=_longer(batch.positions, num_tokens),
        query_starts=np.concatenate([batch.query_starts, ends]),
        context_lens=_longer(batch.context_lens, num_rows),
        block_tables=_longer(batch.block_tables, num_rows),
        logits_indices=_longer(batch.logits_indices, bucket_for(batch.num_sampled, limits.row_buckets)),
    )


def _longer(array: I32, count: int) -> I32:
    """Zeros up to `count` lines."""
    grown = np.zeros((count, *array.shape[1:]), np.int32)
    grown[: len(array)] = array
    return grown


def with_end_row(step: PaddedStep, block_size: int) -> PaddedStep:
    """One more row, in the null block, that holds the tokens past the last one; there may be none."""
    num_tokens = len(step.input_ids)
    num_tail = num_tokens - int(step.query_starts[-1])
    num_rows, width = step.block_tables.shape
    tables = np.zeros((num_rows + 1, max(width, -(-num_tail // block_size))), np.int32)
    tables[:num_rows, :width] = step.block_tables
    return replace(
        step,
        query_starts=np.append(step.query_starts, np.int32(num_tokens)),
        context_lens=np.append(step.context_lens, np.int32(0)),
        block_tables=tables,
    )


def warmup_steps(limits: Limits) -> list[PaddedStep]:
    """Every row bucket with and without tokens past its rows, and every token bucket; all within the null block."""
    token_buckets, top = limits.token_buckets, limits.max_step_tokens
    counts = [(rows, bucket_for(rows, token_buckets), 0) for rows in limits.row_buckets]
    counts += [(rows, bucket_for(rows + 1, token_buckets), 1) for rows in limits.row_buckets if rows < top]
    counts += [(1, tokens, 0) for tokens in token_buckets]
    return [_null_step(num_rows, num_tokens, num_tail, limits) for num_rows, num_tokens, num_tail in counts]


def _null_step(num_rows: int, num_tokens: int, num_tail: int, limits: Limits) -> PaddedStep:
    """Rows of one token, but for the last, which has all that are not in the tail."""
    positions = np.zeros(num_tokens, np.int32)
    longest = num_tokens - num_tail - num_rows + 1
    positions[num_rows - 1 : num_tokens - num_tail] = np.arange(longest)
    query_starts = np.arange(num_rows + 1, dtype=np.int32)
    query_starts[-1] = num_tokens - num_tail
    return PaddedStep(
        input_ids=np.zeros(num_tokens, np.int32),
        positions=positions,
        query_starts=query_starts,
        context_lens=np.zeros(num_rows, np.int32),
        block_tables=np.zeros((num_rows, -(-longest // limits.block_size)), np.int32),
        logits_indices=query_starts[1:] - 1,
    )

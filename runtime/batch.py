"""A plan packed into the flat arrays of the engine's input table (made per step)."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.plugins.sampling_rows import I32, SamplingRows


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs, named as in `engines.io_table`, padded to the limits' buckets.

    T tokens and S sampled rows are bucket sizes. Rows past `num_rows` and sampled rows past `num_sampled` are pads:
    a pad row is one token at position 0 of block 0 with context 0. `num_tokens` counts the live tokens, which come first.
    """

    input_ids: I32  # [T]
    positions: I32  # [T]
    slot_mapping: I32  # [T]
    query_starts: I32  # [B+1]
    context_lens: I32  # [B]
    block_tables: I32  # [B, P]
    logits_indices: I32  # [S]
    sampling: SamplingRows  # num_sampled lines: pads are not sampled on the host
    num_rows: int
    num_tokens: int
    num_sampled: int

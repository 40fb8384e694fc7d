"""A plan packed into the flat arrays of the engine's input table (made per step)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from ostinato.engines.sizes import Limits, bucket_for
from ostinato.plugins.sampling_rows import I32, SamplingRows

from .plan import Plan, PlanRow
from .request import Request
from .sampling import SamplingPacker


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs, named as in `engines.io_table`, padded to the limits' buckets.

    T tokens and S sampled rows are bucket sizes. Rows past `num_rows` and sampled rows past `num_sampled` are pads:
    a pad row is one token at position 0 of block 0 with context 0. `num_tokens` counts the live tokens, which come
    first. Tokens past the last row's belong to no row; they too are at position 0 and slot 0. P is a power of two or
    the limits' largest.
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


class BlockTables:
    """The block tables of the rows that ran last: a row keeps its seat, and only new blocks are written."""

    def __init__(self, limits: Limits) -> None:
        self._tables = np.zeros((limits.max_rows, limits.max_blocks_per_row), np.int32)
        self._num_written = [0] * limits.max_rows
        self._seats: dict[Request, tuple[int, int]] = {}  # (seat, preemptions when seated)
        self._free = list(range(limits.max_rows))
        self._requests: list[Request] = []
        self._num_preemptions: list[int] = []
        self._row_seats: list[int] = []

    def rows(self, requests: list[Request], num_rows: int) -> I32:
        """The requests' tables, [num_rows, P]; zeros where a row has no block."""
        num_preemptions = [request.num_preemptions for request in requests]
        if requests != self._requests or num_preemptions != self._num_preemptions:
            self._reseat(requests)
            self._requests, self._num_preemptions = requests, num_preemptions
        longest = 1
        for seat, request in zip(self._row_seats, requests, strict=True):
            count = len(request.blocks)
            longest = max(longest, count)
            written = self._num_written[seat]
            if count != written:
                self._tables[seat, written:count] = request.blocks[written:]
                self._num_written[seat] = count
        width = min(1 << (longest - 1).bit_length(), self._tables.shape[1])
        tables = np.zeros((num_rows, width), np.int32)
        tables[: len(requests)] = self._tables[self._row_seats, :width]
        return tables

    def _reseat(self, requests: list[Request]) -> None:
        staying = set(requests)
        for request, (seat, num_preemptions) in list(self._seats.items()):
            if request not in staying or request.num_preemptions != num_preemptions:  # its blocks are others now
                del self._seats[request]
                self._free.append(seat)
        for request in requests:
            if request not in self._seats:
                seat = self._free.pop()
                self._seats[request] = (seat, request.num_preemptions)
                self._tables[seat] = 0
                self._num_written[seat] = 0
        self._row_seats = [self._seats[request][0] for request in requests]


class Packer:
    """Makes batches for one engine. Every batch has arrays of its own, except that sampling lines may be shared."""

    def __init__(self, limits: Limits, vocab_size: int) -> None:
        self._limits = limits
        self._tables = BlockTables(limits)
        self._sampling = SamplingPacker(vocab_size)

    def pack(self, plan: Plan) -> Batch:
        """The plan's batch, before the plan is committed."""
        rows, limits = plan.rows, self._limits
        live, num_tokens = len(rows), plan.num_tokens
        num_rows = bucket_for(live, limits.row_buckets)
        num_padded = bucket_for(num_tokens + num_rows - live, limits.token_buckets)
        tables = self._tables.rows([row.request for row in rows], num_rows)
        starts = np.array([row.start for row in rows], np.int32)
        query_starts = np.zeros(num_rows + 1, np.int32)
        context_lens = np.zeros(num_rows, np.int32)
        context_lens[:live] = starts
        counts = np.ones(num_rows, np.int32)
        counts[:live] = [row.end - row.start for row in rows]
        np.cumsum(counts, out=query_starts[1:])

        input_ids, positions, slot_mapping = np.zeros((3, num_padded), np.int32)
        if num_tokens == live:
            row_of = np.arange(live)
            positions[:live] = starts
            input_ids[:live] = [row.request.tokens[row.start] for row in rows]
        else:
            row_of = np.repeat(np.arange(live), counts[:live])
            positions[:num_tokens] = np.arange(num_tokens) + (starts - query_starts[:live])[row_of]
            input_ids[:num_tokens] = list(chain.from_iterable(row.request.tokens[row.start : row.end] for row in rows))
        block, offset = np.divmod(positions[:num_tokens], limits.block_size)
        slot_mapping[:num_tokens] = tables[row_of, block] * limits.block_size + offset
        return Batch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=tables,
            logits_indices=self._logits_indices(rows, query_starts, plan.num_sampled),
            sampling=self._sampling.pack(rows),
            num_rows=live,
            num_tokens=num_tokens,
            num_sampled=plan.num_sampled,
        )

    def _logits_indices(self, rows: tuple[PlanRow, ...], query_starts: I32, num_sampled: int) -> I32:
        """The last `num_sampled` tokens of each row, [S]."""
        indices = np.zeros(bucket_for(num_sampled, self._limits.row_buckets), np.int32)
        counts = np.array([row.num_sampled for row in rows], np.int32)
        first = query_starts[1 : len(rows) + 1] - np.cumsum(counts)
        indices[:num_sampled] = np.repeat(first, counts) + np.arange(num_sampled)
        return indices


def warmup_batches(limits: Limits) -> list[Batch]:
    """Every row bucket with and without tokens past its rows, and every token bucket; all within the null block."""
    token_buckets, top = limits.token_buckets, limits.max_step_tokens
    counts = [(rows, bucket_for(rows, token_buckets), 0) for rows in limits.row_buckets]
    counts += [(rows, bucket_for(rows + 1, token_buckets), 1) for rows in limits.row_buckets if rows < top]
    counts += [(1, tokens, 0) for tokens in token_buckets]
    return [_null_batch(num_rows, num_tokens, num_tail, limits) for num_rows, num_tokens, num_tail in counts]


def _null_batch(num_rows: int, num_tokens: int, num_tail: int, limits: Limits) -> Batch:
    """Rows of one token, but for the last, which has all that are not in the tail."""
    positions = np.zeros(num_tokens, np.int32)
    longest = num_tokens - num_tail - num_rows + 1
    positions[num_rows - 1 : num_tokens - num_tail] = np.arange(longest)
    query_starts = np.arange(num_rows + 1, dtype=np.int32)
    query_starts[-1] = num_tokens - num_tail
    return Batch(
        input_ids=np.zeros(num_tokens, np.int32),
        positions=positions,
        slot_mapping=positions % limits.block_size,
        query_starts=query_starts,
        context_lens=np.zeros(num_rows, np.int32),
        block_tables=np.zeros((num_rows, -(-longest // limits.block_size)), np.int32),
        logits_indices=query_starts[1:] - 1,
        sampling=SamplingPacker(vocab_size=1).pack(()),
        num_rows=num_rows,
        num_tokens=num_tokens - num_tail,
        num_sampled=num_rows,
    )

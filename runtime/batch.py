"""A plan packed into the flat arrays of the engine's input table (made per step)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import I32, SamplingRows

from .block_tables import BlockTables
from .device_rows import DeviceRows
from .device_sampling import DeviceSamplingPacker
from .masks import Masks
from .plan import Plan
from .row_sets import Index, RowSets, StepRows
from .sampling import SamplingPacker
from .steady_columns import SteadyColumns

if TYPE_CHECKING:  # it takes batches
    from .executor import StepRules


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs, named as in `engines.io_table`: T tokens of B rows, S of them sampled, all live.

    An executor pads them as it needs. P is a power of two or the limits' largest. `feed_rows`: -1, or the sampled
    line of the step before whose token is this one, which is 0 in `input_ids`; None where there is no such token.
    """

    input_ids: I32  # [T]
    positions: I32  # [T]
    slot_mapping: I32  # [T]
    query_starts: I32  # [B+1]
    context_lens: I32  # [B]
    block_tables: I32  # [B, P]
    logits_indices: I32  # [S]
    feed_rows: I32 | None  # [T]
    sampling: SamplingRows | DeviceRows

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_sampled(self) -> int:
        return len(self.logits_indices)


class Packer:
    """Makes batches for one executor. A batch's arrays are never written to again; what stays is shared by several."""

    def __init__(self, limits: Limits, vocab_size: int, rules: StepRules) -> None:
        self._block_size = limits.block_size
        self._row_sets = RowSets(limits.max_rows, rules.num_in_flight)
        self._tables = BlockTables(limits)
        self._masks = Masks(vocab_size)
        sizes = (vocab_size, limits.max_rows, rules.num_in_flight)
        self._host = None if rules.keeps_state else SamplingPacker(*sizes, asks_guides_late=rules.samples_in_wait)
        self._sampling = self._host or DeviceSamplingPacker(*sizes)
        self._each_row = np.arange(limits.max_rows)
        self._counting = np.arange(limits.max_rows + 1, dtype=np.int32)  # one token a row, and all of them sampled
        self._steady: SteadyColumns | None = None
        self._still: Batch  # of these rows: what does not move

    def pack(self, plan: Plan) -> Batch:
        """The plan's batch, before the plan is committed."""
        columns = self._steady
        if columns is not None and plan.steady is columns.steady and plan.step == columns.step + 1:
            columns.advance(self._tables, self._block_size)
            return self._steady_batch(columns)
        batch, rows = self._pack(plan)
        self._steady = None
        if plan.steady is not None and plan.step:
            self._steady = SteadyColumns(plan.steady, plan.step, rows, batch.slot_mapping, batch.block_tables)
            self._still = batch
        return batch

    def _steady_batch(self, columns: SteadyColumns) -> Batch:
        """A fed token a row. What does not move is the same array as before: an executor need not look into it."""
        still, rows = self._still, columns.rows
        return Batch(
            still.input_ids,
            positions=rows.starts,
            slot_mapping=columns.slots,
            query_starts=still.query_starts,
            context_lens=rows.starts,
            block_tables=columns.tables,
            logits_indices=still.logits_indices,
            feed_rows=still.feed_rows,
            sampling=self._sampling.pack(rows),
        )

    def _pack(self, plan: Plan) -> tuple[Batch, StepRows]:
        """Row by row, whatever they are."""
        rows = self._row_sets.columns(plan.rows)
        tables = self._tables.rows(rows.row_set)
        num_rows = plan.num_rows
        if plan.num_tokens == num_rows:
            query_starts, row_of, positions = self._counting[: num_rows + 1], self._each_row[:num_rows], rows.starts
        else:
            lengths = rows.ends - rows.starts
            query_starts = np.zeros(num_rows + 1, np.int32)
            np.cumsum(lengths, out=query_starts[1:])
            row_of = np.repeat(self._each_row[:num_rows], lengths)
            positions = np.arange(plan.num_tokens, dtype=np.int32) + (rows.starts - query_starts[:-1])[row_of]
        batch = Batch(
            input_ids=_input_ids(rows, plan),
            positions=positions,
            slot_mapping=self._slots(tables, row_of, positions),
            query_starts=query_starts,
            context_lens=rows.starts,
            block_tables=tables,
            logits_indices=self._logits_indices(rows, query_starts, plan.num_sampled),
            feed_rows=_feed_rows(rows, query_starts),
            sampling=self._sampling.pack(rows),
        )
        return batch, rows

    @property
    def lacks_masks(self) -> bool:
        """Whether the batch packed last waits for `fill_masks`, which may come once it runs."""
        return self._host is not None and self._host.lacks_masks

    def fill_masks(self) -> None:
        """Ask guides on the host for their masks, where the batch lacks them."""
        if self._host is not None:
            self._host.fill_masks()

    def late_masks(self, plan: Plan) -> I32:
        """The masks that the plan's batch lacks, [num_late_masks, W]; the step before is committed."""
        return self._masks.late(plan)

    def _slots(self, tables: I32, row_of: Index, positions: I32) -> I32:
        """block * block_size + offset of each token, [T]."""
        index = positions // self._block_size
        slots: I32 = tables[row_of, index]
        slots -= index
        slots *= self._block_size
        slots += positions
        return slots

    def _logits_indices(self, rows: StepRows, query_starts: I32, num_sampled: int) -> I32:
        """The last `num_sampled` tokens of each row, [S]."""
        if num_sampled == query_starts[-1]:
            return self._counting[:num_sampled]
        counts = np.array(rows.num_sampled, np.int32)
        first = query_starts[1:] - np.cumsum(counts)
        indices: I32 = np.repeat(first, counts).astype(np.int32)
        indices += self._counting[:num_sampled]
        return indices


def _input_ids(rows: StepRows, plan: Plan) -> I32:
    """[T]; 0 for a token that is not known yet, which is a row of its own."""
    if plan.num_tokens > plan.num_rows:
        chunks = (request.tokens[start:end] or (0,) for request, start, end, _, _ in plan.rows)
        return np.fromiter(chain.from_iterable(chunks), np.int32, plan.num_tokens)
    if rows.fed_from is not None and rows.fed_from.min() >= 0:
        return np.zeros(plan.num_tokens, np.int32)
    return np.array([0 if fed >= 0 else request.tokens[start] for request, start, _, _, fed in plan.rows], np.int32)


def _feed_rows(rows: StepRows, query_starts: I32) -> I32 | None:
    """[T]: -1, or where in the step before the token was sampled. A fed row has no other token."""
    if rows.fed_from is None or query_starts[-1] == len(rows.fed_from):
        return rows.fed_from
    feed_rows = np.full(query_starts[-1], -1, np.int32)
    feed_rows[query_starts[:-1]] = rows.fed_from
    return feed_rows

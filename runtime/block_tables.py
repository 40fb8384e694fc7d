"""The block tables of the rows that run: a row keeps its seat, and only new blocks are written (runs per step)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import I32

from .row_sets import RowSet


class BlockTables:
    """One table a seat. What is handed out is never written to again, so steps with the same blocks share it."""

    def __init__(self, limits: Limits) -> None:
        self._tables = np.zeros((limits.max_rows, limits.max_blocks_per_row), np.int32)
        self._num_written = [0] * limits.max_rows
        self._arrivals = np.zeros(limits.max_rows, np.intp)
        self._row_set: RowSet | None = None
        self._counts: list[int] = []
        self._most = 1
        self._seats: list[int] = []
        self._given = np.zeros((0, 1), np.int32)

    def rows(self, row_set: RowSet) -> I32:
        """The requests' tables, [B, P]; zeros where a row has no block."""
        counts = [len(request.blocks) for request in row_set.requests]
        if row_set is self._row_set and counts == self._counts:
            return self._given
        if row_set is not self._row_set:
            self._clear(row_set)
        self._row_set, self._counts, self._seats = row_set, counts, row_set.seats.tolist()
        self._most = max(counts, default=1)
        return self._give(range(len(counts)))

    def grown(self, row_set: RowSet, rows: Sequence[int]) -> I32:
        """The tables of the set that was asked for last, of which only these rows may have new blocks."""
        assert row_set is self._row_set, "other rows came between"
        for row in rows:
            self._counts[row] = count = len(row_set.requests[row].blocks)
            self._most = max(self._most, count)
        return self._give(rows)

    def _give(self, rows: Iterable[int]) -> I32:
        """The set's tables, once new blocks of these rows are written."""
        assert self._row_set is not None
        num_written, requests = self._num_written, self._row_set.requests
        for row in rows:
            seat, count = self._seats[row], self._counts[row]
            written = num_written[seat]
            if count != written:
                self._tables[seat, written:count] = requests[row].blocks[written:]
                num_written[seat] = count
        width = min(1 << (self._most - 1).bit_length(), self._tables.shape[1])
        self._given = self._tables[self._row_set.seats, :width]
        return self._given

    def _clear(self, row_set: RowSet) -> None:
        """Empty the seats of those who came new, or back with other blocks."""
        for seat in row_set.seats[self._arrivals[row_set.seats] != row_set.arrivals].tolist():
            self._tables[seat] = 0
            self._num_written[seat] = 0
        self._arrivals[row_set.seats] = row_set.arrivals

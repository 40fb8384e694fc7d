"""The columns of steady rows that move: each step's are those of the step before, a token later (made per step).

They are added to, never written over, since a batch keeps its arrays.
"""

from __future__ import annotations

import numpy as np

from ostinato.plugins.sampling_rows import I32

from .block_tables import BlockTables
from .row_sets import StepRows
from .steady import SteadyRows


class SteadyColumns:
    """Goes on from a step of steady rows that was packed row by row, with these rows, slots and tables."""

    def __init__(self, steady: SteadyRows, step: int, rows: StepRows, slots: I32, tables: I32) -> None:
        self.steady, self.step, self.rows, self.slots, self.tables = steady, step, rows, slots, tables
        self._moving = np.stack([rows.starts, slots])

    def advance(self, block_tables: BlockTables, block_size: int) -> None:
        """To the next step."""
        steady, moving = self.steady, self._moving + 1
        self.step = step = self.step + 1
        entering = steady.entering(step)
        if entering:
            for row in entering:
                block = steady.requests[row].blocks[steady.start(row, step) // block_size]
                moving[1, row] = block * block_size
            self.tables = block_tables.grown(self.rows.row_set, entering)
        self._moving = moving
        starts, self.slots = moving
        rows = self.rows
        self.rows = StepRows(rows.row_set, starts, starts + 1, rows.num_sampled, rows.fed_from, steady, step)

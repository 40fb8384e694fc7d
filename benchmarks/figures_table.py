"""A benchmark's figures as a table that is whole in a terminal of 80 columns and in a pipe (once per run)."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_ANY_WIDTH = 10_000


class FiguresTable:
    """`num_texts` columns of words, which may fold, then columns of figures; a name may be of several lines."""

    def __init__(self, title: str, *columns: str, num_texts: int = 0) -> None:
        self._title = title
        self._table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for place, column in enumerate(self._table.columns):
            column.no_wrap, column.justify = place >= num_texts, "left" if place < num_texts else "right"

    def add(self, *cells: str) -> None:
        self._table.add_row(*map(Text, cells))

    def add_line(self) -> None:
        """Between what was measured and what follows from it."""
        self._table.add_section()

    def show(self) -> None:
        """Where even folded words leave no room, lines are longer than the terminal's: nothing is cut."""
        console = Console(file=sys.stdout)
        needed = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), self._table).minimum
        print(self._title)
        Console(file=sys.stdout, width=max(console.width, needed)).print(self._table)

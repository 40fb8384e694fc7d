"""How a build shows itself: one line a stage with its time, and a bar while a stage runs (offline)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar


class ConsoleProgress:
    """Prints finished stages as plain lines, so that a log file reads as well as a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Bar(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # where nothing is drawn, rich would still print an empty line
        )
        self._task: TaskID | None = None
        self._name = ""
        self._began = 0.0

    def stage(self, name: str, total_bytes: int = 0) -> None:
        self.finish()
        self._name, self._began = name, time.perf_counter()
        self._task = self._bar.add_task(name, total=total_bytes or None, detail="")

    def advance(self, num_bytes: int) -> None:
        assert self._task is not None, "advance comes after stage"
        self._bar.advance(self._task, num_bytes)

    def detail(self, text: str) -> None:
        """Drawn beside the bar while it is; not printed."""
        assert self._task is not None, "detail comes after stage"
        self._bar.update(self._task, detail=text)

    def finish(self) -> None:
        """Print the running stage as done."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
            self._console.print(f"{self._name:>12}  {time.perf_counter() - self._began:.1f} s", highlight=False)

    @contextmanager
    def shown(self) -> Iterator[ConsoleProgress]:
        """Draw until the block ends; the last stage is printed only if nothing was raised."""
        with self._bar:
            yield self
            self.finish()

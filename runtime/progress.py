"""Progress on the terminal while something long runs: opening a bundle, generating offline (on standard error)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Show = Callable[[str, int, int], None]  # (what, done, total)


def bar(shown: bool) -> Progress:
    """A bar that leaves nothing behind; with `shown` false, and where no terminal shows it, it draws nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))


@contextmanager
def loading(shown: bool) -> Iterator[Show]:
    """A bar that goes through named stages."""
    with bar(shown) as progress:
        task = progress.add_task("open", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield show


def end_bars() -> None:
    """Give back the cursor that a bar hid, for a process that ends while one is drawn."""
    console = Console(stderr=True)
    if console.is_terminal:
        console.line()
        console.show_cursor(True)

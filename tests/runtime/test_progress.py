"""Progress is for terminals: where none shows it, nothing is printed, not even an empty line."""

from __future__ import annotations

import io
import sys

import pytest

from ostinato.runtime.progress import bar, loading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "shown", "is_drawn"), [(io.StringIO, True, False), (Terminal, False, False), (Terminal, True, True)]
)
def test_a_bar_is_drawn_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, file: type[io.StringIO], shown: bool, is_drawn: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    printed = file()
    monkeypatch.setattr(sys, "stderr", printed)
    with loading(shown) as show:
        show("check the bundle", 1, 2)
    with bar(shown) as progress:
        progress.add_task("generate", total=1)
    assert bool(printed.getvalue()) == is_drawn

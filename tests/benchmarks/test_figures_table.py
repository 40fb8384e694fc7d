"""A benchmark's table is whole: figures are never cut, words fold where 80 columns are too few."""

from __future__ import annotations

import pytest
from figures_table import FiguresTable


@pytest.mark.parametrize("columns", ["80", "20"])
def test_no_figure_is_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    names = [f"column\n{place}" for place in range(7)]
    figures = [f"{place}123.45" for place in range(7)]
    table = FiguresTable("What was measured", "engine", *names, num_texts=1)
    table.add("words that fold " * 5, *figures)
    table.show()
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "What was measured"
    assert any(line.split()[-7:] == figures for line in lines)
    assert "…" not in "".join(lines)
    if columns == "80":
        assert max(map(len, lines)) <= 80


def test_what_follows_is_set_apart(capsys: pytest.CaptureFixture[str]) -> None:
    table = FiguresTable("t", "engine", "B=1", num_texts=1)
    table.add("[ours]", "2")
    table.add_line()
    table.add("ratio", "1.00")
    table.show()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    ours, ratio = (next(place for place, line in enumerate(lines) if word in line) for word in ("[ours]", "ratio"))
    assert ratio == ours + 2  # a line between

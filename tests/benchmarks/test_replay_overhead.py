"""The replay benchmark runs, and its figures are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from replay_overhead import PARTS, main, row_cost


def test_every_bucket_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "1,2", "--steps", "6", "--out", str(tmp_path)]) == 0
    assert "µs a replayed decode step" in capsys.readouterr().out
    record = json.loads((tmp_path / "replay_overhead.json").read_text())
    assert [one["rows"] for one in record["microseconds"]] == [1, 2]
    for one in record["microseconds"]:
        assert one["steps"] == 6
        assert all(one[part] > 0 for part in (*PARTS, "host", "device"))
    assert (tmp_path / "replay_overhead.png").read_bytes().startswith(b"\x89PNG")


def test_a_rows_cost_is_the_slope() -> None:
    base, slope = row_cost([{"rows": rows, "host": 40 + 2.5 * rows} for rows in (1, 2, 4, 8)])
    assert base == pytest.approx(40)
    assert slope == pytest.approx(2.5)

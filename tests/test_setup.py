"""The set-up script beside a pip that only talks: few lines, and the end of pip's own where it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Plays Python, which makes an environment in which it plays pip.
_PYTHON = """#!/usr/bin/env bash
case "$1 $2 $3" in
    "-c "*) exit 0 ;;
    "-m venv "*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/pip ;;
    "-m pip install")
        for i in $(seq 90); do echo "Collecting part$i (from whole)"; echo "  Downloading part$i.whl"; done
        echo "Installing collected packages: part1, part2"
        [ ! -e broken ] || { echo "ERROR: part7 does not fit" >&2; exit 1; } ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / "python").write_text(_PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def set_up(tree: Path, python: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(tree / "scripts" / "setup.sh"), python or str(tree / "python")]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tree)


def test_a_set_up_tells_little_and_keeps_all(tree: Path) -> None:
    done = set_up(tree)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[1:4] == [
        *("  40 packages: collecting part40", "  80 packages: collecting part80"),
        "  90 packages: installing them, a minute or two",
    ]
    assert (lines[-1], len(lines)) == ("setup: done", 8)  # pip runs twice
    assert (tree / ".venv" / "setup.log").read_text().count("Collecting") == 180
    assert (tree / ".venv" / ".ready").exists()
    assert sorted(path.name for path in (tree / ".types" / "ostinato").iterdir()) == [
        *("builder", "engines", "plugins", "runtime"),
    ]


def test_a_terminal_sees_one_line_that_counts(tree: Path) -> None:
    ours, theirs = os.openpty()
    command = ["bash", str(tree / "scripts" / "setup.sh"), str(tree / "python")]
    with subprocess.Popen(command, stdout=theirs, cwd=tree) as process:
        os.close(theirs)
        told = b""
        while chunk := _read(ours):
            told += chunk
    os.close(ours)
    assert process.returncode == 0
    assert told.count(b"\n") == 2
    assert b"\r\x1b[K  57 packages: collecting part57" in told


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # nobody writes there any more
        return b""


def test_a_set_up_that_fails_ends_with_what_pip_said(tree: Path) -> None:
    (tree / "broken").touch()
    done = set_up(tree)
    assert done.returncode == 1
    assert done.stderr.startswith("setup: pip could not install ")
    assert ".venv/setup.log" in done.stderr
    assert done.stderr.endswith("ERROR: part7 does not fit\n")
    assert not (tree / ".venv" / ".ready").exists()


def test_a_python_that_there_is_not_is_named(tree: Path) -> None:
    done = set_up(tree, "python9.9")
    assert done.returncode == 2
    assert done.stderr == "setup: there is no python9.9: give Python 3.11 or newer, such as make PYTHON=python3.11\n"

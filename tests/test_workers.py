"""Tests of a file, or of one `xdist_group`, run in one worker: else all would be made twice, which nobody would see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from .conftest import unit_of

ROOT = Path(__file__).parent.parent
FILES = ("tests/runtime/test_stops.py", "tests/runtime/test_json_depth.py")
_DONE = re.compile(r"^\[(gw\d)\] .* PASSED (\S+)::", re.MULTILINE)


def test_files_of_a_group_are_one_unit_and_any_other_is_its_own() -> None:
    together = {unit_of(f"tests/builder/test_{name}.py") for name in ("half", "segments", "rtx")}
    assert together == {"gpu graphs"}
    assert unit_of(FILES[0]) == FILES[0]


def test_a_worker_runs_all_of_a_file() -> None:
    plugins = ("-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *plugins, "-n", "2", "--dist", "loadgroup", "-v", *FILES]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    workers: dict[str, set[str]] = {}
    for worker, file in _DONE.findall(done.stdout):
        workers.setdefault(file, set()).add(worker)
    assert sorted(workers) == sorted(FILES)
    assert all(len(found) == 1 for found in workers.values()), workers
    assert len(set.union(*workers.values())) == 2

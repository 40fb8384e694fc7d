"""A command that is told to end leaves no process and no half-written folder, and prints no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .test_kernel_compiler import SWEEP, WIDE

_BUILD = """
import sys, time
from pathlib import Path
from ostinato.builder.termination import orderly_termination
from ostinato.engines.bundle import unfinished_bundle
with orderly_termination(), unfinished_bundle(Path(sys.argv[1])) as folder:
    (folder / "rank0").mkdir()
    print("building", flush=True)
    time.sleep(60)
"""
_KERNELS = """
import signal, sys
from ostinato.engines.command import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job would ignore
sys.exit(main(["kernels", *sys.argv[1:]]))
"""
_PATIENCE = 60.0  # seconds


def test_a_build_that_is_terminated_leaves_nothing_half_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _BUILD, str(tmp_path / "b")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "building\n"
        assert (tmp_path / ".building-b").is_dir()
        builder.terminate()
        _, errors = builder.communicate(timeout=_PATIENCE)
    assert (builder.returncode, errors) == (143, "")
    assert {path.name for path in tmp_path.iterdir()} == {".b.lock"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_compilation_that_is_ended_says_nothing_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Ctrl-C goes to every process of a terminal's group; SIGTERM to the command alone."""
    (tmp_path / "sweep.toml").write_text(SWEEP)
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    out = tmp_path / "out"
    arguments = [str(tmp_path / "sweep.toml"), "--config", str(tmp_path / "config.json"), "--out", str(out)]
    command = [sys.executable, "-c", _KERNELS, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        started = _wait_for(lambda: _children(process.pid)[2:])  # two that compile, one that tracks them
        time.sleep(0.2)  # they are somewhere in their imports; that nothing shows must hold wherever
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, errors = process.communicate(timeout=_PATIENCE)
    assert started
    assert process.returncode == code
    assert "Traceback" not in errors
    _wait_for(lambda: not _group(process.pid))
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def _wait_for(condition: object) -> bool:
    assert callable(condition)
    end = time.monotonic() + _PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, "in vain"
        time.sleep(0.05)
    return bool(found)


def _children(process: int) -> list[int]:
    return [child for child, parent, _ in _processes() if parent == process]


def _group(leader: int) -> list[int]:
    return [process for process, _, group in _processes() if group == leader]


def _processes() -> list[tuple[int, int, int]]:
    """Process, parent and group of every one that lives."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # gone meanwhile
        if state not in "ZX":
            found.append((int(path.parent.name), int(parent), int(group)))
    return found

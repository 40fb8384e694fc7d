"""A build for TensorRT-RTX that is killed at one point after another, while its own processes work (run as a process).

The build runs once until it makes its first engine; there it forks a child that goes on to the end and one for every
point, which kills itself. What each leaves on disk is set aside as LEFT/NAME; a line says how many of its processes
live on.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ostinato.builder.pipeline import build

from ..scale import scaled
from .conftest import Silent
from .gpu_graphs import gpu_recipe
from .killed_build import CHANGES, KILL

# Stage → how many points, spread over it. The tokenizer is any target's, whose builds are killed everywhere.
POINTS = {"engines": scaled(3, 10), "kernels": scaled(2, 6), "tokenizer": scaled(0, 1), "publish": scaled(1, 3)}
_PATIENCE = 60.0  # seconds for a process to notice; they take less than one, if they do


class _Forks(Silent):
    """Progress that forks before the first engine. `work` holds the build's folder and all temporary files."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._work, self._left, self._begun = folder / "work", folder / "left", folder / "begun"
        self._marks, self._children = folder / "marks", folder / "children"
        self._point: tuple[str, int] | None = None  # in a child that is to die: the stage, and the points to come in it
        self._ticks: list[str] = []

    def stage(self, name: str, total_bytes: int = 0) -> None:
        super().stage(name)
        if name == "engines":
            self._fork_all()

    def advance(self, num_bytes: int) -> None:
        self._tick()

    def detail(self, text: str) -> None:
        self._tick()

    def finish(self) -> None:
        """The child that nobody kills has its bundle."""
        self._marks.write_text("\n".join(self._ticks))

    def _fork_all(self) -> None:
        """Returns in the children alone."""
        shutil.copytree(self._work, self._begun)
        if self._is_child("whole", None):
            return
        marks = self._marks.read_text().split()
        for stage, count in POINTS.items():
            for number in range(count):
                if self._is_child(f"{stage}-{number}", (stage, marks.count(stage) * number // count)):
                    return
        os._exit(0)

    def _is_child(self, name: str, point: tuple[str, int] | None) -> bool:
        self._children.write_text("")
        if (child := os.fork()) == 0:
            self._point = point
            sys.addaudithook(self._hear)
            return True
        _, status = os.waitpid(child, 0)
        how = "killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == KILL else "finished"
        mine = [int(process) for process in self._children.read_text().split()]
        end = time.monotonic() + _PATIENCE
        while (alive := [process for process in mine if _lives(process)]) and time.monotonic() < end:
            time.sleep(0.05)
        shutil.copytree(self._work, self._left / name)
        print(name, how, len(mine), len(alive), flush=True)
        for entry in self._work.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else None  # the lock stays: this process holds it
        shutil.copytree(self._begun, self._work, dirs_exist_ok=True)
        return False

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES and str(arguments[0]).startswith(str(self._work)):
            self._tick()

    def _tick(self) -> None:
        self._ticks.append(self.stages[-1])
        if self._point == (self.stages[-1], 0):
            self._point = None
            self._children.write_text(" ".join(map(str, _descendants(os.getpid()))))
            os.kill(os.getpid(), KILL)
        elif self._point is not None and self._point[0] == self.stages[-1]:
            self._point = self._point[0], self._point[1] - 1


def _descendants(process: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*"):
        if _field(int(path.name), 1) == str(process):
            yield int(path.name)
            yield from _descendants(int(path.name))


def _lives(process: int) -> bool:
    return _field(process, 0) not in ("", "Z", "X")


def _field(process: int, index: int) -> str:
    """Of /proc/N/stat, behind the name: 0 is the state, 1 the parent; "" where there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[index]
    except OSError:
        return ""


def main(checkpoint: Path, folder: Path) -> None:
    """Prints a line a point; `folder` must be empty. Never returns."""
    torch.set_num_threads(1)  # a forked child has no other threads
    for name in ("work", "left"):
        (folder / name).mkdir()
    (folder / "work" / "tmp").mkdir()
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "work" / "tmp")
    progress = _Forks(folder)
    build(gpu_recipe(checkpoint, "float16", compute_capabilities=("8.6",)), folder / "work" / "b", progress)
    progress.finish()
    os._exit(0)

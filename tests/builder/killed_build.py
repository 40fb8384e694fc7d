"""A build of a tiny checkpoint that is killed, or runs out of disk, at one point after another (run as a process).

The build runs once until it writes its first file, which takes most of the time; there it forks a child for every
point, and each child goes on with the build until it kills itself. What a child leaves on disk is set aside as
LEFT/NAME.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch

from ostinato.builder.pipeline import build
from ostinato.engines.errors import OstinatoError

from .conftest import Silent, tiny_recipe

KILL = 9
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "shutil.rmtree")  # audit events
_ADVANCES_A_POINT = 8  # weights written
_FILE_LIMITS = (0, 1000, 20_000)  # bytes


class _Forks(Silent):
    """Progress that forks before the first file; `work` holds the build's folder, and nothing else."""

    def __init__(self, work: Path, old: Path, left: Path) -> None:
        super().__init__()
        self._work, self._old, self._left = work, old, left
        self._countdown = -1  # points to come until this child dies
        self._advances = 0

    def stage(self, name: str, total_bytes: int = 0) -> None:
        if name == "weights":
            self._fork_all()

    def advance(self, num_bytes: int) -> None:
        self._advances += 1
        if self._advances % _ADVANCES_A_POINT == 0:
            self._tick()

    def _fork_all(self) -> None:
        """Returns in the children alone."""
        for name in self._kills():
            if (child := os.fork()) == 0:
                sys.addaudithook(self._hear)
                return
            _, status = os.waitpid(child, 0)
            shutil.copytree(self._work, self._left / name)
            print(name, "killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == KILL else "finished", flush=True)
            self._countdown = -1 if os.WIFEXITED(status) else self._countdown
        for limit in _FILE_LIMITS:
            self._reset(with_old=False)
            if (child := os.fork()) == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                return
            os.waitpid(child, 0)
            shutil.copytree(self._work, self._left / f"full-{limit}")
        os._exit(0)

    def _kills(self) -> Iterator[str]:
        """A name for every point, with and without a bundle that the build replaces, until a child finishes."""
        for kind in ("fresh", "replacing"):
            for point in count():
                self._reset(with_old=kind == "replacing")
                self._countdown = point
                yield f"{kind}-{point}"
                if self._countdown < 0:
                    break

    def _reset(self, with_old: bool) -> None:
        for entry in self._work.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else None  # the lock stays: this process holds it
        (self._work / ".building-b" / "rank0").mkdir(parents=True)
        if with_old:
            shutil.copytree(self._old, self._work / "b")

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES and str(arguments[0]).startswith(str(self._work)):
            self._tick()

    def _tick(self) -> None:
        if self._countdown == 0:
            os.kill(os.getpid(), KILL)
        self._countdown -= 1


def main(checkpoint: Path, old: Path, folder: Path) -> None:
    """Prints a line a point; `folder` must be empty. Never returns from the children."""
    torch.set_num_threads(1)  # a forked child has no other threads
    work, left = folder / "work", folder / "left"
    work.mkdir()
    left.mkdir()
    try:
        build(tiny_recipe(checkpoint), work / "b", _Forks(work, old, left))
    except OstinatoError as error:
        print(f"refused {type(error).__name__}: {error}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

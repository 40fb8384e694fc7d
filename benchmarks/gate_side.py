"""The gate's end of a side: a revision's sources, and the child that runs them, frozen while it is not its turn."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frozen_process import FrozenProcess

ROOT = Path(__file__).resolve().parent.parent
CHILD = Path(__file__).resolve().parent / "latency_side.py"
# Large blocks in huge pages: with small ones a process may be 3% slower than its twin for as long as it lives.
PLACEMENT = ":".join(f"glibc.malloc.{option}" for option in ("hugetlb=1", "mmap_threshold=2000000000", "arena_max=1"))
ROOMS = ("engines", "plugins", "builder", "runtime")


class GateError(Exception):
    """The gate can't measure; one line that says why."""


@dataclass(frozen=True)
class Source:
    """What one side runs. `revision` "": the working tree. `child`: the program that measures it."""

    name: str
    bundle: Path
    revision: str = ""
    child: Path = CHILD


def check_out(revision: str, folder: Path) -> str:
    """Write a revision's files to `folder`, beside them a view to import them by; returns the commit.

    An archive and not a worktree: it leaves nothing in the repository, not even when the gate is killed.
    """
    commit = _git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", commit))) as archive:
        archive.extractall(folder / "tree", filter="data")
    make_view(folder / "tree", folder / "view")
    return commit


def make_view(tree: Path, view: Path) -> None:
    """A folder for PYTHONPATH in which `ostinato` has the tree's rooms."""
    (view / "ostinato").mkdir(parents=True)
    for room in ROOMS:
        (view / "ostinato" / room).symlink_to(tree / room)


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    if done.returncode:
        raise GateError(f"git {arguments[0]} failed: {done.stderr.decode().strip().splitlines()[-1]}")
    return done.stdout


class SideProcess:
    """A source's child, frozen except while it answers."""

    def __init__(self, source: Source, folder: Path) -> None:
        """`folder`: a new one of this side's own, for its sources and its log."""
        if not (source.bundle / "manifest.json").exists():
            raise GateError(f"{source.name}: found no bundle at {source.bundle}: give a folder with a manifest.json")
        folder.mkdir()
        self.name = source.name
        self.commit = check_out(source.revision, folder) if source.revision else "working tree"
        if not source.revision:
            make_view(ROOT, folder / "view")
        self._view = folder / "view"
        self._log = folder / "log.txt"
        path = os.pathsep.join([str(self._view), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {"GLIBC_TUNABLES": PLACEMENT} | os.environ | {"PYTHONPATH": path}
        self._process = FrozenProcess([sys.executable, str(source.child)], self._log, environment)

    def open(self, bundle: Path, cores: list[int], rows: int) -> dict[str, Any]:
        """Load; returns who answers, checked to be the side's own sources."""
        opened = self.ask("open", bundle=str(bundle), cores=cores, rows=rows)
        if not Path(opened["package"]).is_relative_to(self._view):
            raise GateError(f"{self.name} imported {opened['package']}, wanted it from {self._view}")
        return opened | {"commit": self.commit}

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        reply = self._process.ask(operation, **arguments)
        if reply is None:
            raise GateError(f"{self.name} ended while it had to {operation}: {self._last_words()}")
        if "error" in reply:
            raise GateError(f"{self.name} could not {operation}: {reply['error']}")
        return reply

    def close(self) -> None:
        self._process.close()

    def _last_words(self) -> str:
        lines = self._log.read_text().strip().splitlines()
        return lines[-1] if lines else "it said nothing"

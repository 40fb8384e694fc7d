"""A build that is killed at any of its file operations leaves nothing half-written that opens; nor does a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.builder.pipeline import build
from ostinato.engines.bundle import open_bundle
from ostinato.engines.errors import BundleError
from ostinato.engines.manifest import Manifest

from ..engines import made
from .conftest import Pair, Silent, tiny_recipe
from .killed_rtx_build import POINTS

pytestmark = pytest.mark.xdist_group("killed builds")  # one process makes them all
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def ends(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of what each end left, and the lines that were printed."""
    folder, old = tmp_path_factory.mktemp("killed"), tmp_path_factory.mktemp("old") / "b"
    made.make(old)
    command = [sys.executable, "-m", "tests.builder.killed_build", str(llama[1].path.parent / "checkpoint"), str(old)]
    done = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "left", done.stdout.splitlines()


@pytest.fixture(scope="module")
def rtx_ends(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """As `ends`, of a build whose engines and kernels are made by processes of its own; words of the lines."""
    folder = tmp_path_factory.mktemp("killed-rtx")
    paths = [str(llama[1].path.parent / "checkpoint"), str(folder)]
    # not as a module of its own, which each process that compiles kernels would import
    code = "import sys; from pathlib import Path; from tests.builder.killed_rtx_build import main; "
    command = [sys.executable, "-c", f"{code} main(*map(Path, sys.argv[1:]))", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "left", [line.split() for line in done.stdout.splitlines()]


def _opened(path: Path) -> Manifest | None:
    try:
        return open_bundle(path).manifest
    except BundleError:
        return None


def _killed(lines: list[str], kind: str) -> list[str]:
    names = [line.split() for line in lines if line.startswith(kind)]
    assert [name for name, how in names if how == "finished"] == [names[-1][0]]  # the last had no point left
    return [name for name, how in names if how == "killed"]


@pytest.mark.parametrize("kind", ["fresh", "replacing"])
def test_a_killed_build_leaves_all_or_nothing(ends: tuple[Path, list[str]], llama: Pair, kind: str) -> None:
    left, lines = ends
    names = _killed(lines, kind)
    assert len(names) >= 20
    found = []
    for name in names:
        opened = {path.name: _opened(path) for path in (left / name).iterdir() if path.is_dir()}
        inside = opened.pop("b", None)
        found.append("none" if inside is None else "new" if inside.files == llama[1].manifest.files else "old")
        # A folder set aside may be whole, the one or the other, but under no name that anyone opens.
        assert all(whole is None or folder.startswith(".building-b") for folder, whole in opened.items())
    before = {"fresh": "none", "replacing": "old"}[kind]
    assert found == sorted(found, key=lambda state: {before: 0, "none": 1, "new": 2}[state])
    assert {found[0], found[-1]} == {before, "new"}
    assert found.count("none") <= 1 or kind == "fresh"  # between two renames; the next build puts the old one back


@pytest.mark.parametrize("kind", ["fresh", "replacing"])
def test_the_next_build_clears_up(ends: tuple[Path, list[str]], kind: str) -> None:
    left, lines = ends
    for name in _killed(lines, kind):
        made.make(left / name / "b")
        open_bundle(left / name / "b")
        assert {path.name for path in (left / name).iterdir()} == {"b", ".b.lock"}


def test_a_whole_build_succeeds_over_what_a_killed_one_left(ends: tuple[Path, list[str]], llama: Pair) -> None:
    left, lines = ends
    folder = left / f"{_killed(lines, 'fresh')[-4]}"
    build(tiny_recipe(llama[1].path.parent / "checkpoint"), folder / "b", Silent())
    assert open_bundle(folder / "b").manifest.files == llama[1].manifest.files


def test_a_killed_rtx_build_leaves_all_or_nothing(rtx_ends: tuple[Path, list[list[str]]]) -> None:
    left, lines = rtx_ends
    assert [(name, how) for name, how, *_ in lines if how != "killed"] == [("whole", "finished")]
    assert len(lines) == 1 + sum(POINTS.values())
    whole = open_bundle(left / "whole" / "b").manifest
    found = []
    for name, *_ in lines[1:]:
        opened = {path.name: _opened(path) for path in (left / name).iterdir() if path.is_dir()}
        found.append(opened.pop("b", None) is not None)
        assert all(manifest is None for folder, manifest in opened.items() if folder != ".building-b")
        assert not list((left / name / "tmp").iterdir()), "temporary files lie in the build's own folder"
    before = len(found) - POINTS["publish"]
    assert not any(found[:before]), "nothing opens before all of it is written"
    assert whole.target == "rtx"
    assert len(whole.engines[0]) == 3


def test_no_process_of_a_killed_rtx_build_lives_on(rtx_ends: tuple[Path, list[list[str]]]) -> None:
    _, lines = rtx_ends
    processes = {name: (int(had), int(alive)) for name, _, had, alive in lines}
    assert {alive for _, alive in processes.values()} == {0}
    assert processes[f"engines-{POINTS['engines'] // 2}"][0] >= 1
    assert processes[f"kernels-{POINTS['kernels'] // 2}"][0] >= 2


def test_a_full_disk_leaves_nothing_and_says_so_in_one_line(ends: tuple[Path, list[str]]) -> None:
    left, lines = ends
    refusals = [line for line in lines if line.startswith("refused")]
    assert len(refusals) == 3
    for line in refusals:
        assert line.startswith("refused BundleError: no room to write ")
        assert "(File too large): free some, or give another --out; nothing was left there" in line
    full = [folder for folder in left.iterdir() if folder.name.startswith("full-")]
    assert [{path.name for path in folder.iterdir()} for folder in full] == [{".b.lock"}] * 3

"""The wheel holds exactly the tree's files, installs one import name, and runs as a module."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("engines", "plugins", "builder", "runtime")
LOBBY = "engines/lobby"  # what lies in `ostinato` itself


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    source = tmp_path / "source"
    source.mkdir()
    for name in (*ROOMS, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)  # so that build output lands outside the tree
    subprocess.run([*pip, str(source)], check=True, capture_output=True)
    (made,) = tmp_path.glob("*.whl")
    return made


def test_wheel_equals_tree(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tree = {
        f"ostinato/{path.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for pattern in ("*.py", "py.typed", "recipes/*.toml", "console/*", "x86/*.[ch]")
        for path in (ROOT / room).glob(pattern)
    }
    assert packed == tree | {f"ostinato/{path.name}" for path in (ROOT / LOBBY).glob("*.py")}


def test_the_package_is_the_command(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    command = [sys.executable, "-m", "ostinato"]
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True, check=False)
    told = run([*command, "--version"])
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith("ostinato ")
    refused = run([*command, "biuld"])
    assert refused.returncode == 2
    assert "did you mean build?" in refused.stderr

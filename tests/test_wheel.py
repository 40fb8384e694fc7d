"""The wheel holds exactly the tree's files, and installs one import name."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("engines", "plugins", "builder", "runtime")


def test_wheel_equals_tree(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    source = tmp_path / "source"
    source.mkdir()
    for name in (*ROOMS, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)  # so that build output lands outside the tree
    subprocess.run([*pip, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tree = {
        f"ostinato/{path.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for pattern in ("*.py", "py.typed", "recipes/*.toml", "console/*", "x86/*.[ch]")
        for path in (ROOT / room).glob(pattern)
    }
    assert packed == tree

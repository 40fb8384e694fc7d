"""What this version can't run is refused in one line, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.engines.command import main

from ..engines.made import make_gpu


@pytest.mark.parametrize(
    ("command", "options"), [("generate", ["--prompt", "x"]), ("chat", ["--prompt", "x"]), ("serve", ["--port", "0"])]
)
def test_a_gpu_bundle_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, options: list[str]
) -> None:
    path = make_gpu(tmp_path / "b").path
    assert main([command, str(path), *options]) == 2
    printed = capfd.readouterr().err.splitlines()
    assert printed[-1] == (
        f"ostinato {command}: {path} is for target rtx, this version runs bundles for target cpu: build one from a "
        "recipe with target cpu"
    )
    assert not any("Traceback" in line for line in printed)

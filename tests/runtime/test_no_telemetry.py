"""Nothing is reported to anybody: a library that would do so on import finds no means to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_opening_openvino_leaves_no_client_id(tmp_path: Path) -> None:
    code = "import ostinato.runtime.openvino, openvino.tools.ovc as ovc; print(type(ovc.telemetry).__module__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "openvino.tools.ovc.telemetry_stub"
    assert not list(tmp_path.iterdir()), "its id of this machine"

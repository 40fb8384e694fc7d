"""What a figure was measured on: read once per benchmark run and written beside every result."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent.parent / "build" / "benchmarks"  # records worth keeping are copied to results/


def machine() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in GiB, and the versions that matter."""
    models = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "python": platform.python_version(),
        "openvino": version("openvino"),
    }


def save_result(name: str, result: dict[str, Any], folder: Path = OUT) -> Path:
    """Write `NAME.json` with machine, date and the exact command."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    head = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
    }
    path.write_text(json.dumps(head | result, indent=1) + "\n")
    return path

"""The record of a run on a GPU: machine, tests, measures; written as JSON and Markdown when the run ends (in tests)."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "cuda-bindings", "numpy", "tensorrt-rtx-cu13", "tensorrt-cu13")


@dataclass(frozen=True)
class Measure:
    """One number. `detail`: what it was measured with, by name."""

    name: str
    value: float
    unit: str
    detail: dict[str, Any]

    @property
    def line(self) -> tuple[str, str, str]:
        detail = ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                           for key, value in self.detail.items())  # fmt: skip
        return self.name, f"{self.value:.4g} {self.unit}", detail


@dataclass
class Sheet:
    """`gpu`: name, compute capability, driver, memory. `outcomes`: test → "passed", "failed: …" or "skipped: …"."""

    gpu: dict[str, Any] = field(default_factory=dict)
    measures: list[Measure] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: float, unit: str, **detail: Any) -> None:
        self.measures.append(Measure(name, value, unit, detail))

    def lines(self) -> list[str]:
        """The table."""
        rows = [("measure", "value", "with"), *(measure.line for measure in self.measures)]
        first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
        return [f"{row[0]:<{first}}  {row[1]:>{second}}  {row[2]}".rstrip() for row in rows]

    def write(self, folder: Path) -> Path:
        """folder/gpu-NAME-DATE.json and .md; returns the first."""
        folder.mkdir(parents=True, exist_ok=True)
        day = datetime.now(UTC).date().isoformat()
        name = re.sub("[^a-z0-9]+", "-", str(self.gpu.get("name", "none")).lower()).strip("-")
        path = folder / f"gpu-{name}-{day}.json"
        record = {
            "command": "scripts/gpu_tests.sh",
            "date": day,
            "machine": self.gpu | {"python": platform.python_version()} | _versions(),
            "tests": self.outcomes,
            "measures": [asdict(measure) for measure in self.measures],
        }
        path.write_text(json.dumps(record, indent=1) + "\n")
        machine = ", ".join(f"{key} {value}" for key, value in record["machine"].items())  # type: ignore[attr-defined]
        table = [" | ".join(measure.line) for measure in self.measures]
        head = ["| measure | value | with |", "|---|---|---|", *(f"| {row} |" for row in table)]
        outcomes = [f"- {test}: {outcome}" for test, outcome in self.outcomes.items()]
        path.with_suffix(".md").write_text("\n".join([f"# {day}", "", machine, "", *head, "", *outcomes]) + "\n")
        return path


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

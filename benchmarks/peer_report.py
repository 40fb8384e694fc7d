"""What `peers.py` found, as a table for people and as JSON for machines; runs once, at the end of a benchmark."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PREFILL = "prefill"
FEWEST_SAMPLES = 2
WIDEST_SPREAD = 1.25  # largest sample ÷ smallest


@dataclass
class Result:
    """One engine's samples: decode tokens per second by row count, prefill milliseconds; and what went wrong."""

    name: str
    label: str
    precision: str = "–"
    versions: dict[str, str] = field(default_factory=dict)
    notes: str = ""
    decode: dict[int, list[float]] = field(default_factory=dict)
    prefill_ms: list[float] = field(default_factory=list)
    seconds: dict[int, list[tuple[float, float]]] = field(
        default_factory=dict
    )  # rows → (one new token, all new tokens)
    errors: list[str] = field(default_factory=list)

    def samples(self, column: int | str) -> list[float]:
        """All samples of a column: a row count, or PREFILL."""
        return self.prefill_ms if column == PREFILL else self.decode.get(int(column), [])

    def unsteady(self, column: int | str) -> bool:
        """True where one sample cannot be trusted: too few to tell, or too far apart."""
        samples = self.samples(column)
        return len(samples) < FEWEST_SAMPLES or max(samples) > WIDEST_SPREAD * min(samples)

    def median(self, column: int | str) -> float | None:
        """Median of a column."""
        samples = self.samples(column)
        return statistics.median(samples) if samples else None

    @property
    def ours(self) -> bool:
        """True for ostinato."""
        return self.name.startswith("ostinato")


def ratio(result: Result, results: list[Result], column: int | str) -> float | None:
    """How many times faster than the best peer in this column: above 1, `result` wins."""
    mine = result.median(column)
    peers = [value for other in results if not other.ours and (value := other.median(column)) is not None]
    if mine is None or not peers:
        return None
    return min(peers) / mine if column == PREFILL else mine / max(peers)


def print_table(results: list[Result], rows: list[int]) -> None:
    """Medians, ratios and errors."""
    from figures_table import FiguresTable  # rich: peers' own environments do without

    columns: list[int | str] = [*rows, PREFILL]
    names = ("prefill\nms" if column == PREFILL else f"B={column}" for column in columns)
    title = "SmolLM2-135M-Instruct, decode tokens/s by rows (256 tokens of prompt), prefill of 512"
    table = FiguresTable(title, "engine", "precision", *names, num_texts=2)
    for result in results:
        versions = result.versions.get(next(iter(result.versions), ""), "")
        table.add(
            f"{result.label} {versions}".strip(), result.precision, *(_cell(result, column) for column in columns)
        )
    table.add_line()
    for result in results:
        if result.ours:
            ratios = (_number(ratio(result, results, column), 2) for column in columns)
            table.add(f"{result.label} ÷ best peer", "", *ratios)
    table.show()
    print(f"~ samples more than {WIDEST_SPREAD}× apart, or fewer than {FEWEST_SAMPLES}: measure again, quietly")
    for result in results:
        for error in result.errors:
            print(f"{result.label}: {error}")


def write_json(path: Path, results: list[Result], settings: dict[str, Any]) -> None:
    """Every sample, with what is needed to run it again."""
    columns: list[int | str] = [*settings["rows"], PREFILL]
    report = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "machine": machine(),
        "settings": settings,
        "engines": [
            {**asdict(result), "medians": {str(column): result.median(column) for column in columns}}
            for result in results
        ],
        "ratios": {r.name: {str(column): ratio(r, results, column) for column in columns} for r in results if r.ours},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def machine() -> dict[str, Any]:
    """Processor model, the instructions that decide which kernels run, cores and memory."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    interesting = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    return {
        "cpu": fields.get("model name", platform.processor()),
        "instructions": [flag for flag in interesting if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _cell(result: Result, column: int | str) -> str:
    value = result.median(column)
    mark = "~" if value is not None and result.unsteady(column) else ""
    return mark + _number(value, 1 if column == 1 else 0)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"

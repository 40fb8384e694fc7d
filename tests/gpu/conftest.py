"""Skips the whole folder, unimported, where there is no GPU; gives the tests the GPU and the sheet where there is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.gpu.found import missing_device, missing_torch
from tests.gpu.sheet import Sheet

if TYPE_CHECKING:
    from tests.gpu.gpu import Gpu

BUILD = Path(__file__).parent.parent.parent / "build" / "gpu"
OUT = Path(os.environ.get("OUT") or BUILD)
_SHEET = Sheet()


class _NotHere(pytest.Module):
    """A test file that is not imported."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(_reason(), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    return _NotHere.from_parent(parent, path=module_path) if _reason() else None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.gpu)


def _reason() -> str:
    """Why nothing of this folder runs."""
    if "PYTEST_XDIST_WORKER" in os.environ and not missing_device():
        return "they want the GPU for themselves: run scripts/gpu_tests.sh"
    return missing_device()


@pytest.fixture(scope="session")
def sheet() -> Sheet:
    return _SHEET


@pytest.fixture(scope="session")
def gpu(sheet: Sheet) -> Iterator[Gpu]:
    from ostinato.engines.architectures import KERNEL_ARCHITECTURES
    from tests.gpu.gpu import Gpu
    from tests.gpu.kernel_store import KernelStore

    found = Gpu(KernelStore(BUILD / "kernels"))
    device = found.device
    sheet.gpu |= {
        "name": device.name,
        "compute_capability": device.compute_capability,
        "cuda": ".".join(map(str, device.driver_version)),
        "memory_gib": round(device.memory().total / 2**30, 1),
    }
    if device.compute_capability not in KERNEL_ARCHITECTURES:
        pytest.skip(f"no kernels are built for compute capability {device.compute_capability}")
    yield found
    found.close()


@pytest.fixture(scope="session")
def torch_on_gpu() -> None:
    if reason := missing_torch():
        pytest.skip(reason)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    said = "" if report.passed else f": {_last_line(report)}"
    _SHEET.outcomes[report.nodeid] = report.outcome + said


def pytest_runtest_logfinish() -> None:
    if _SHEET.gpu:  # after every test: the next may be killed
        _SHEET.write(OUT)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _SHEET.gpu:
        terminalreporter.section("measures")
        for line in [*_SHEET.lines(), "", f"written to {_SHEET.write(OUT)}"]:
            terminalreporter.write_line(line)


def _last_line(report: pytest.TestReport) -> str:
    """The skip's reason, or the error's line."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    return lines[0].removeprefix("E").strip() if lines else "no reason given"

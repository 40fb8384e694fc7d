"""What a machine has, or lacks, of what a GPU bundle needs."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda.bindings.driver import CUresult as Status

from ostinato.engines.fit import MINIMUM_DRIVER
from ostinato.plugins.source_digest import source_digest
from ostinato.runtime.libraries import Libraries
from ostinato.runtime.machine import find_machine
from tests.sim.driver import SimDriver

KERNEL_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)\nGCC version: 12\n"
)


def libraries(driver: object) -> Libraries:
    return Libraries(driver=driver, tensorrt=SimpleNamespace(__version__="1.7.1.116"))


def test_everything_is_found(tmp_path: Path) -> None:
    driver = SimDriver(num_devices=2)
    driver.capability = (12, 0)
    version = tmp_path / "version"
    version.write_text(KERNEL_MODULE)
    found = find_machine("rtx", libraries(driver), 1, version)
    assert found.architecture == platform.machine()
    assert found.plugin_digest == source_digest()
    assert (found.gpu_name, found.compute_capability) == ("Simulated GPU", "12.0")
    assert found.driver_version == "580.65.06"
    assert found.tensorrt_version == "1.7.1.116"
    assert driver.contexts == 0  # it only asks


@pytest.mark.parametrize(("cuda", "wanted"), [(13020, MINIMUM_DRIVER), (13000, MINIMUM_DRIVER), (12080, "12.8")])
def test_a_driver_without_a_readable_version_is_as_old_as_its_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: int, wanted: str
) -> None:
    driver = SimDriver()
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (Status.CUDA_SUCCESS, cuda))
    assert find_machine("rtx", libraries(driver), 0, tmp_path / "none").driver_version == wanted


def test_a_machine_without_such_a_gpu_still_has_a_driver(tmp_path: Path) -> None:
    found = find_machine("rtx", libraries(SimDriver()), 3, tmp_path / "none")
    assert (found.compute_capability, found.gpu_name) == (None, None)
    assert found.driver_version == MINIMUM_DRIVER


@pytest.mark.parametrize("status", [Status.CUDA_ERROR_NO_DEVICE, Status.CUDA_ERROR_UNKNOWN])
def test_a_driver_that_reaches_no_gpu_is_not_told_to_be_missing(
    tmp_path: Path, status: Status, caplog: pytest.LogCaptureFixture
) -> None:
    driver = SimDriver()
    driver.faults.calls["cuInit"] = status
    found = find_machine("rtx", libraries(driver), 0, tmp_path / "none")
    assert (found.compute_capability, found.driver_version) == (None, MINIMUM_DRIVER)
    assert status.name in caplog.messages[0]


def test_a_machine_without_a_driver_has_nothing(tmp_path: Path) -> None:
    driver = SimDriver()
    driver.faults.calls["cuDriverGetVersion"] = Status.CUDA_ERROR_STUB_LIBRARY
    found = find_machine("rtx", libraries(driver), 0, tmp_path / "none")
    assert (found.compute_capability, found.gpu_name, found.driver_version) == (None, None, None)


def test_a_library_that_does_not_load_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert find_machine("trt", Libraries(driver=SimDriver()), 0, tmp_path / "none").tensorrt_version is None

"""What this machine has of what a bundle needs (asked once, before anything of the bundle is loaded)."""

from __future__ import annotations

import logging
import platform
import re
from pathlib import Path

from ostinato.engines.errors import DeviceError
from ostinato.engines.fit import MINIMUM_DRIVER, Machine
from ostinato.engines.processor import find_cpu_flags
from ostinato.plugins.cubin import cuda_driver
from ostinato.plugins.source_digest import source_digest

from .cuda_call import check, name_and_capability
from .libraries import Libraries
from .trt import load_tensorrt

_VERSION_FILE = Path("/proc/driver/nvidia/version")
_MINIMUM_CUDA = 13000  # what the oldest driver that will do serves

logger = logging.getLogger(__name__)


def find_processor() -> Machine:
    """This machine as far as bundles for CPUs ask."""
    return Machine(platform.machine(), "", system=platform.system(), cpu_flags=find_cpu_flags())


def find_machine(target: str, libraries: Libraries, ordinal: int = 0, version_file: Path = _VERSION_FILE) -> Machine:
    """This machine with its GPU number `ordinal`. What is not there is None, whatever the reason."""
    name, capability, driver_version = _gpu(libraries, ordinal, version_file)
    return Machine(
        architecture=platform.machine(),
        plugin_digest=source_digest(),
        compute_capability=capability,
        gpu_name=name,
        driver_version=driver_version,
        tensorrt_version=_tensorrt_version(target, libraries),
    )


def _gpu(libraries: Libraries, ordinal: int, version_file: Path) -> tuple[str | None, str | None, str | None]:
    """Name, compute capability, driver's version."""
    driver_version = None
    try:
        driver = cuda_driver() if libraries.driver is None else libraries.driver
        # First, because it answers even where CUDA can't start.
        (cuda,) = check(driver, "ask for the driver's version", driver.cuDriverGetVersion)
        driver_version = _driver_version(cuda, version_file)
        check(driver, "start CUDA", driver.cuInit, 0)
        (device,) = check(driver, f"find GPU {ordinal}", driver.cuDeviceGet, ordinal)
        return *name_and_capability(driver, device), driver_version
    except DeviceError as error:
        if driver_version is not None:  # else the library that is missing says nothing of interest
            logger.warning("no GPU can be used: %s", error)
        return None, None, driver_version


def _driver_version(cuda: int, version_file: Path) -> str:
    """As the kernel module says; where it can't be read, as old as the CUDA version that the driver serves allows.

    A driver serves one CUDA version, of which it is known only which NVIDIA release began to serve it.
    """
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", version_file.read_text())
    except OSError:
        found = None
    if found is not None:
        return found.group()
    return MINIMUM_DRIVER if cuda >= _MINIMUM_CUDA else f"{cuda // 1000}.{cuda % 1000 // 10}"


def _tensorrt_version(target: str, libraries: Libraries) -> str | None:
    try:
        module = load_tensorrt(target) if libraries.tensorrt is None else libraries.tensorrt
    except DeviceError:
        return None
    return str(module.__version__)

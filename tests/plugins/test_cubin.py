"""Loading and launching compiled kernels: what the driver is asked for, and what its refusals become."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.engines.errors import BundleError, DeviceError
from ostinato.engines.program import KernelInfo
from ostinato.plugins.cubin import Cubins

from ..cuda_driver import FakeDriver, Launched, Status

SMALL = KernelInfo("entry_a", num_warps=4, shared_bytes=1024, num_hidden_pointers=2, registers=32, spill_bytes=0)
LARGE = KernelInfo("entry_b", num_warps=8, shared_bytes=90_000, num_hidden_pointers=0, registers=64, spill_bytes=0)
FUNCTION = {name: f"{entry} in module of {name} sm_90" for name, entry in (("a", "entry_a"), ("b", "entry_b"))}


def cubins(folder: Path, driver: FakeDriver, architectures: tuple[str, ...] = ("sm_80", "sm_90")) -> Cubins:
    for architecture in architectures:
        (folder / architecture).mkdir(exist_ok=True)
        for name in ("a", "b"):
            (folder / architecture / f"{name}.cubin").write_text(f"{name} {architecture}")
    return Cubins(folder, {architecture: {"a": SMALL, "b": LARGE} for architecture in architectures}, driver)


def test_a_launch_gives_the_driver_grid_block_memory_stream_and_pointers(tmp_path: Path) -> None:
    driver = FakeDriver(num_pointers={FUNCTION["a"]: 5, FUNCTION["b"]: 1})
    loaded = cubins(tmp_path, driver)
    loaded.prepare(["a", "b", "a"])
    assert driver.calls.count("cuModuleLoadData") == 2
    assert driver.shared == {FUNCTION["b"]: 90_000}, "more than 48 KiB must be asked for, and only that"
    before = len(driver.calls)
    loaded.launch("a", (3, 4, 5), [0x10, 0x20, 2**63 + 7], 0x77)
    loaded.launch("b", (1, 1, 1), [0x30], 0)
    assert driver.calls[before:] == ["cuLaunchKernel"] * 2, "a launch that is captured may do nothing else"
    hidden = (0, 0)
    assert driver.launches == [
        Launched(FUNCTION["a"], (3, 4, 5), (128, 1, 1), 1024, 0x77, (0x10, 0x20, 2**63 + 7, *hidden)),
        Launched(FUNCTION["b"], (1, 1, 1), (256, 1, 1), 90_000, 0, (0x30,)),
    ]


def test_close_unloads_every_module_once(tmp_path: Path) -> None:
    driver = FakeDriver()
    loaded = cubins(tmp_path, driver)
    loaded.prepare(["a", "b"])
    loaded.close()
    loaded.close()
    assert driver.calls.count("cuModuleUnload") == 2


@pytest.mark.parametrize(
    ("capability", "built", "chosen"),
    [
        ((9, 0), ("sm_80", "sm_90"), "sm_90"),
        ((8, 9), ("sm_80", "sm_86"), "sm_86"),  # binaries of 8.x run on later 8.x: the nearest
        ((8, 6), ("sm_80", "sm_87", "sm_89"), "sm_80"),
        ((12, 1), ("sm_80", "sm_120"), "sm_120"),
    ],
)
def test_the_nearest_binary_that_runs_is_chosen(
    tmp_path: Path, capability: tuple[int, int], built: tuple[str, ...], chosen: str
) -> None:
    assert cubins(tmp_path, FakeDriver(capability), built).architecture == chosen


@pytest.mark.parametrize(("capability", "built"), [((9, 0), ("sm_80",)), ((8, 7), ("sm_86",)), ((10, 0), ())])
def test_a_gpu_without_kernels_is_refused(tmp_path: Path, capability: tuple[int, int], built: tuple[str, ...]) -> None:
    with pytest.raises(BundleError, match=f"compute capability {capability[0]}.{capability[1]}.*build again"):
        cubins(tmp_path, FakeDriver(capability), built).prepare(["a"])


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ("cuCtxGetDevice", Status.CUDA_ERROR_INVALID_CONTEXT),
        ("cuModuleLoadData", Status.CUDA_ERROR_INVALID_IMAGE),
        ("cuModuleGetFunction", Status.CUDA_ERROR_INVALID_IMAGE),
        ("cuFuncSetAttribute", Status.CUDA_ERROR_INVALID_IMAGE),
    ],
)
def test_what_the_driver_refuses_is_one_line(tmp_path: Path, call: str, status: Status) -> None:
    with pytest.raises(DeviceError, match=status.name) as refused:
        cubins(tmp_path, FakeDriver(faults={call: status})).prepare(["b"])
    assert "\n" not in str(refused.value)


def test_a_failed_launch_is_an_error_that_names_the_kernel(tmp_path: Path) -> None:
    driver = FakeDriver(num_pointers={FUNCTION["a"]: 3})
    loaded = cubins(tmp_path, driver)
    loaded.prepare(["a"])
    driver.faults["cuLaunchKernel"] = Status.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(DeviceError, match=r"launch a: .*CUDA_ERROR_LAUNCH_FAILED \(719\)"):
        loaded.launch("a", (1, 1, 1), [1], 0)


def test_a_missing_file_or_kernel_is_refused(tmp_path: Path) -> None:
    loaded = cubins(tmp_path, FakeDriver())
    with pytest.raises(BundleError, match="no kernel c"):
        loaded.prepare(["c"])
    (tmp_path / "sm_90" / "a.cubin").unlink()
    with pytest.raises(BundleError, match=r"a\.cubin can't be read"):
        loaded.prepare(["a"])


def test_without_a_driver_the_refusal_is_one_line(tmp_path: Path) -> None:
    """The real cuda-python; on a machine with a driver there is no current context, which is refused as well."""
    with pytest.raises(DeviceError) as refused:
        Cubins(tmp_path, {}).compute_capability  # noqa: B018
    assert "\n" not in str(refused.value)
    assert "can't ask for the current GPU" in str(refused.value)


def test_the_real_driver_module_takes_our_arguments() -> None:
    """Types are checked before the library is looked for: without one, nothing but its absence may be complained of."""
    import ctypes

    from cuda.bindings import driver

    values = (ctypes.c_void_p * 1)(7)
    place = (ctypes.c_void_p * 1)(ctypes.addressof(values))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    for function, arguments in (
        (driver.cuCtxGetDevice, ()),
        (driver.cuModuleLoadData, (b"cubin",)),
        (driver.cuModuleGetFunction, (driver.CUmodule(0), b"entry")),
        (driver.cuFuncSetAttribute, (driver.CUfunction(0), attribute, 90_000)),
        (driver.cuModuleUnload, (driver.CUmodule(0),)),
        (
            driver.cuLaunchKernel,
            (driver.CUfunction(0), 1, 1, 1, 32, 1, 1, 0, driver.CUstream(5), ctypes.addressof(place), 0),
        ),
    ):
        try:
            status, *_ = function(*arguments)
        except RuntimeError as error:
            assert type(error).__name__ == "DynamicLibNotFoundError"  # noqa: PT017
        else:
            assert int(status), "nothing of this is valid"

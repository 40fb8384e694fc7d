"""One call to the CUDA driver: its values, or one line that says what to do (called at start and per step)."""

from __future__ import annotations

from typing import Any

from ostinato.engines.errors import DeviceError

_LOST = "the CUDA context is lost: restart the server; if it comes again see dmesg for the driver's Xid"
_ADVICE = {
    "CUDA_ERROR_OUT_OF_MEMORY": "end what else uses the GPU (nvidia-smi), or build with fewer kv_tokens or max_rows",
    "CUDA_ERROR_NO_DEVICE": "see nvidia-smi and CUDA_VISIBLE_DEVICES, or serve a bundle for cpu",
    "CUDA_ERROR_INVALID_DEVICE": "see nvidia-smi and CUDA_VISIBLE_DEVICES for the GPUs that are there",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver was updated: restart the machine",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "install a newer NVIDIA driver",
    "CUDA_ERROR_STUB_LIBRARY": "libcuda is a stub: install an NVIDIA driver",
    "CUDA_ERROR_ILLEGAL_ADDRESS": _LOST,
    "CUDA_ERROR_LAUNCH_FAILED": _LOST,
    "CUDA_ERROR_ECC_UNCORRECTABLE": _LOST,
    "CUDA_ERROR_DEVICE_UNAVAILABLE": _LOST,
}


def ask(what: str, function: Any, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
    """One driver call: its status and its values. Raises DeviceError where the driver is missing or too old."""
    try:
        answer: tuple[Any, ...] = function(*arguments)
    except RuntimeError as error:  # cuda-python: no driver library, or one without this function
        reason = str(error).split(". ")[0].rstrip(".")
        raise DeviceError(
            f"can't {what}: {reason}: install an NVIDIA driver (a newer one if there is one), or serve a bundle for cpu"
        ) from None
    return answer[0], answer[1:]


def check(driver: Any, what: str, function: Any, *arguments: Any) -> tuple[Any, ...]:
    """One driver call: its values, or a DeviceError in one line."""
    status, values = ask(what, function, *arguments)
    if int(status):
        raise refusal(driver, what, function.__name__, status)
    return values


def refusal(driver: Any, what: str, call: str, status: Any) -> DeviceError:
    """What the driver did not do, its own explanation, and what to do."""
    failed, text = driver.cuGetErrorString(status)
    explanation = "no explanation" if int(failed) or not text else text.decode()
    advice = _ADVICE.get(status.name, "see nvidia-smi, and that the bundle fits this machine (ostinato inspect)")
    return DeviceError(f"can't {what}: {call} returned {status.name} ({int(status)}, {explanation}): {advice}")


def name_and_capability(driver: Any, device: Any) -> tuple[str, str]:
    """A GPU's name and compute capability, such as "9.0"."""
    (name,) = check(driver, "ask for the GPU's name", driver.cuDeviceGetName, 128, device)
    kinds, ask_for = driver.CUdevice_attribute, "ask for the compute capability"
    both = (
        kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )
    numbers = (check(driver, ask_for, driver.cuDeviceGetAttribute, kind, device)[0] for kind in both)
    return name.split(b"\0")[0].decode(), ".".join(map(str, numbers))

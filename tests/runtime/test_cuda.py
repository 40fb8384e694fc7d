"""Handles over the driver: what they answer, what its refusals become, and that everything is given back."""

from __future__ import annotations

import numpy as np
import pytest
from cuda.bindings.driver import CUresult as Status

from ostinato.engines.errors import DeviceError
from ostinato.runtime.capture import capture
from ostinato.runtime.cuda import Device, Stream

from ..sim.driver import SimDriver


def device_on(driver: SimDriver) -> Device:
    return Device(driver=driver, clock=driver.clock.now, sleep=driver.clock.sleep)


@pytest.fixture
def driver() -> SimDriver:
    return SimDriver(capacity=1 << 20)


@pytest.fixture
def device(driver: SimDriver) -> Device:
    return device_on(driver)


def test_a_device_says_what_it_is(device: Device) -> None:
    assert (device.name, device.compute_capability, device.driver_version) == ("Simulated GPU", "9.0", (13, 2))
    memory = device.memory()
    device.allocate(1000, "test")
    assert device.memory().free == memory.free - 1000
    assert device.memory().total == 1 << 20


def test_bytes_go_up_across_and_down(device: Device) -> None:
    stream, pinned = device.stream(), device.allocate_pinned(64, "test")
    first, second = device.allocate(32, "test"), device.allocate(32, "test")
    pinned.view[:32] = np.arange(32)
    stream.upload(first.address, pinned.address, 32)
    stream.fill(first.address, 9, 4)
    stream.fill_words(first.address + 4, 0x04030201, 2)
    stream.copy(second.address, first.address, 32)
    stream.download(pinned.address + 32, second.address, 32)
    stream.wait("the copies")
    assert pinned.view[32:].tolist() == [9] * 4 + [1, 2, 3, 4] * 2 + list(range(12, 32))


def test_events_order_two_streams_and_tell_when_they_are_reached(device: Device) -> None:
    first, second, event = device.stream(), device.stream(), device.event()
    assert event.is_done(), "an event that was never recorded holds nothing up"
    source, target, pinned = device.allocate(4, "test"), device.allocate(4, "test"), device.allocate_pinned(4, "test")
    first.fill(source.address, 7, 4)
    first.record(event)
    second.after(event)
    second.copy(target.address, source.address, 4)
    second.download(pinned.address, target.address, 4)
    second.wait("the copy")
    assert pinned.view.tolist() == [7] * 4
    assert event.is_done()


def test_a_missing_driver_is_one_line() -> None:
    """The real cuda-python; on a machine with a driver there is no such GPU."""
    with pytest.raises(DeviceError, match=r"^can't (start CUDA: .*install an NVIDIA driver|find GPU 99)") as refused:
        Device(99)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("call", "status", "wanted"),
    [
        (
            "cuInit",
            Status.CUDA_ERROR_NO_DEVICE,
            "can't start CUDA: cuInit returned CUDA_ERROR_NO_DEVICE (100, no device): "
            "see nvidia-smi and CUDA_VISIBLE_DEVICES, or serve a bundle for cpu",
        ),
        (
            "cuDevicePrimaryCtxRetain",
            Status.CUDA_ERROR_OUT_OF_MEMORY,
            "can't use Simulated GPU: cuDevicePrimaryCtxRetain returned CUDA_ERROR_OUT_OF_MEMORY (2, out of memory): "
            "end what else uses the GPU (nvidia-smi), or build with fewer kv_tokens or max_rows",
        ),
    ],
)
def test_what_the_driver_refuses_is_one_line_that_says_what_to_do(
    driver: SimDriver, call: str, status: Status, wanted: str
) -> None:
    driver.faults.calls[call] = status
    with pytest.raises(DeviceError) as refused:
        device_on(driver)
    assert str(refused.value) == wanted
    assert not driver.alive()


def test_a_gpu_that_is_not_there_is_named(driver: SimDriver) -> None:
    with pytest.raises(DeviceError, match=r"can't find GPU 3: cuDeviceGet returned CUDA_ERROR_INVALID_DEVICE"):
        Device(3, driver)


def test_everything_is_given_back_newest_first(driver: SimDriver, device: Device) -> None:
    stream, block = device.stream(), device.allocate(4, "test")
    device.event()
    device.allocate_pinned(4, "test")
    capture(stream, lambda stream: stream.fill(block.address, 0, 4), "a graph")
    stream.fill(block.address, 1, 4)
    order = ["cuGraphExecDestroy", "cuMemFreeHost", "cuEventDestroy", "cuMemFree", "cuStreamDestroy"]
    before = list(driver.calls)
    device.close()
    device.close()
    assert [name for name in driver.calls if name not in before] == [
        "cuStreamQuery",
        *order,
        "cuDevicePrimaryCtxRelease",
    ]
    assert not driver.alive()
    assert not driver.abandoned


def test_a_closed_handle_is_not_taken_for_the_legacy_stream(device: Device) -> None:
    stream, event = device.stream(), device.event()
    stream.close()
    stream.close()
    with pytest.raises(AssertionError, match="after it was closed"):
        stream.record(event)


def test_what_is_not_taken_back_at_first_is_tried_again(driver: SimDriver, device: Device) -> None:
    device.allocate(4, "test")
    device.stream()
    driver.faults.at[driver.calls.total() + 2] = Status.CUDA_ERROR_UNKNOWN
    device.close()
    assert driver.calls["cuStreamDestroy"] == 2
    assert not driver.alive()
    assert not driver.abandoned


def test_what_is_never_taken_back_goes_with_the_context_and_is_told(driver: SimDriver, device: Device) -> None:
    block = device.allocate(4, "a block")
    driver.faults.calls["cuMemFree"] = Status.CUDA_ERROR_UNKNOWN
    with pytest.raises(DeviceError, match="can't free a block: cuMemFree returned CUDA_ERROR_UNKNOWN"):
        device.close()
    assert not driver.alive()
    assert len(driver.abandoned) == 1
    block.close()


def test_nothing_is_allocated_once_the_device_is_sealed_or_while_it_captures(device: Device) -> None:
    def allocate(stream: Stream) -> None:
        device.allocate(4, "a buffer")

    stream = device.stream()
    with pytest.raises(AssertionError, match="a buffer is allocated while a graph is captured"):
        capture(stream, allocate, "a graph")
    with pytest.raises(AssertionError, match="is waited for while a graph is captured"):
        capture(stream, lambda stream: stream.wait("it"), "a graph")
    device.seal()
    for make in (
        lambda: device.allocate(4, "it"),
        lambda: device.allocate_pinned(4, "it"),
        device.stream,
        device.event,
    ):
        with pytest.raises(AssertionError, match="after the device is ready"):
            make()
    with pytest.raises(AssertionError, match="after the device is ready"):
        capture(stream, lambda stream: None, "a graph")


CAPTURE_CALLS = ["cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy", "cuGraphUpload"]  # in this order


@pytest.mark.parametrize("call", CAPTURE_CALLS)
def test_a_capture_that_fails_leaves_nothing_and_a_usable_stream(driver: SimDriver, device: Device, call: str) -> None:
    stream, block, pinned = device.stream(), device.allocate(4, "test"), device.allocate_pinned(4, "test")

    def record(stream: Stream) -> None:
        stream.fill(block.address, 1, 4)
        number = driver.calls.total() + 1 + CAPTURE_CALLS.index(call)
        driver.faults.at[number] = Status.CUDA_ERROR_UNKNOWN

    with pytest.raises(DeviceError, match=f"a graph: {call} returned CUDA_ERROR_UNKNOWN"):
        capture(stream, record, "a graph")
    stream.fill(block.address, 2, 4)
    stream.download(pinned.address, block.address, 4)
    stream.wait("the stream")
    assert pinned.view.tolist() == [2] * 4
    assert call == "cuGraphDestroy" or not [one for one in driver.alive() if "graph" in one]
    device.close()
    assert not driver.alive()
    assert not driver.abandoned

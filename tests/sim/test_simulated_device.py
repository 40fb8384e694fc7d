"""The simulated device is as strict as it says: every rule is broken once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings.driver import CUresult as Status

from ostinato.engines.errors import DeviceError
from ostinato.runtime.capture import capture
from ostinato.runtime.cuda import Device, Stream

from .driver import SimDriver
from .kernels import SimKernel
from .memory import SimError


def device_on(driver: SimDriver) -> Device:
    return Device(driver=driver, clock=driver.clock.now, sleep=driver.clock.sleep)


@pytest.fixture
def driver() -> SimDriver:
    return SimDriver(capacity=1 << 20)


@pytest.fixture
def device(driver: SimDriver) -> Device:
    return device_on(driver)


def put(driver: SimDriver, stream: Stream, work: Callable[[], None]) -> None:
    """Work of our own, as a stand-in for TensorRT puts it there."""
    assert driver.submit(stream.address, "ours", work)


def numbers(driver: SimDriver, address: int, count: int) -> Any:
    return driver.memory.view(address, "int32", (count,))


def test_fresh_memory_is_not_a_number(driver: SimDriver, device: Device) -> None:
    block = device.allocate(64, "test")
    pinned = device.allocate_pinned(64, "test")
    for dtype in ("float16", "float32"):
        assert np.isnan(driver.memory.view(block.address, dtype, (16,))).all()
        assert np.isnan(pinned.view.view(dtype)).all()
    assert (numbers(driver, block.address, 16) > 2**30).all()


def test_work_waits_until_it_is_asked_for_and_host_memory_is_read_when_the_copy_runs(
    driver: SimDriver, device: Device
) -> None:
    stream, block, pinned = device.stream(), device.allocate(4, "test"), device.allocate_pinned(4, "test")
    pinned.view[:] = 1
    stream.upload(block.address, pinned.address, 4)
    pinned.view[:] = 2
    assert numbers(driver, block.address, 1)[0] == 0x7FFF7FFF
    stream.wait("the copy")
    assert numbers(driver, block.address, 1)[0] == 0x02020202


def test_a_download_is_poison_until_it_has_run(device: Device) -> None:
    stream, block, pinned = device.stream(), device.allocate(4, "test"), device.allocate_pinned(4, "test")
    stream.fill(block.address, 5, 4)
    pinned.view[:] = 3
    stream.download(pinned.address, block.address, 4)
    assert pinned.view.tolist() == [0xFF, 0x7F, 0xFF, 0x7F]
    stream.wait("the copy")
    assert pinned.view.tolist() == [5] * 4


@pytest.mark.parametrize(("offset", "count"), [(0, 65), (64, 1), (-1, 1), (1 << 30, 1)])
def test_copies_out_of_bounds_are_refused(device: Device, offset: int, count: int) -> None:
    stream, block, pinned = device.stream(), device.allocate(64, "test"), device.allocate_pinned(256, "test")
    with pytest.raises(SimError, match="bounds"):
        stream.upload(block.address + offset, pinned.address, count)
    with pytest.raises(SimError, match="bounds"):
        stream.fill(block.address + offset, 0, count)


def test_pageable_host_memory_is_refused(device: Device) -> None:
    array = np.zeros(4, np.uint8)
    with pytest.raises(SimError, match="pinned memory's bounds"):
        device.stream().upload(device.allocate(4, "test").address, array.ctypes.data, 4)


def test_memory_that_is_freed_is_not_used(device: Device) -> None:
    stream, block, pinned = device.stream(), device.allocate(4, "test"), device.allocate_pinned(4, "test")
    stream.upload(block.address, pinned.address, 4)
    block.close()
    with pytest.raises(SimError, match="after it was freed"):
        stream.wait("a copy into freed memory")
    with pytest.raises(SimError, match="after it was freed"):
        stream.fill(block.address, 0, 4)
    assert device.allocate(4, "test").address != block.address


def test_a_kernels_views_are_checked(driver: SimDriver, device: Device) -> None:
    block = device.allocate(512, "test")
    with pytest.raises(SimError, match="misaligned"):
        driver.memory.view(block.address + 4, "float32", (1,))
    with pytest.raises(SimError, match="bounds"):
        driver.memory.view(block.address + 256, "float32", (65,))
    driver.memory.fence(block.address, 128)
    driver.memory.fence(block.address + 256, 256)
    driver.memory.view(block.address + 256, "float32", (64,))
    with pytest.raises(SimError, match="reach out of their buffer"):
        driver.memory.view(block.address, "float32", (33,))


def test_handles_that_do_not_live_are_refused(device: Device) -> None:
    stream, event = device.stream(), device.event()
    raw = stream.raw
    stream.close()
    with pytest.raises(SimError, match="does not live"):
        device.check("use it", device.driver.cuEventRecord, event.raw, raw)


def test_a_stream_with_work_is_not_destroyed(driver: SimDriver, device: Device) -> None:
    stream = device.stream()
    put(driver, stream, lambda: None)
    with pytest.raises(SimError, match="before its work is done"):
        stream.close()


def test_a_thread_without_the_context_is_refused(device: Device) -> None:
    import threading

    found: list[str] = []

    def elsewhere() -> None:
        try:
            device.memory()
        except DeviceError as error:
            found.append(str(error))
        device.make_current()
        device.memory()
        found.append("current")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "CUDA_ERROR_INVALID_CONTEXT" in found[0]
    assert found[1] == "current"


def order_of_work(seed: int) -> str:
    driver = SimDriver(seed=seed)
    device = device_on(driver)
    first, second, event = device.stream(), device.stream(), device.event()
    ran: list[str] = []
    put(driver, first, lambda: ran.append("a"))
    put(driver, first, lambda: ran.append("b"))
    first.record(event)
    put(driver, first, lambda: ran.append("c"))
    put(driver, second, lambda: ran.append("x"))
    second.after(event)
    put(driver, second, lambda: ran.append("y"))
    first.wait("the first")
    second.wait("the second")
    return "".join(ran)


def test_work_keeps_its_order_in_a_stream_and_along_events() -> None:
    """Every legal order is met, and no other: of the ten that keep the streams' own, three have y before b."""
    legal = {"abcxy", "abxcy", "abxyc", "axbcy", "axbyc", "xabcy", "xabyc"}
    assert {order_of_work(seed) for seed in range(200)} == legal


def test_nothing_more_than_is_needed_runs_without_a_seed(driver: SimDriver, device: Device) -> None:
    first, second, event, ran = device.stream(), device.stream(), device.event(), []
    put(driver, first, lambda: ran.append("a"))
    first.record(event)
    put(driver, first, lambda: ran.append("b"))
    put(driver, second, lambda: ran.append("x"))
    event.wait("a")
    assert ran == ["a"]


FORBIDDEN: dict[str, Callable[[Device, Stream], object]] = {
    "allocation": lambda device, _: device.check("do", device.driver.cuMemAlloc, 4),
    "pinned allocation": lambda device, _: device.check("do", device.driver.cuMemHostAlloc, 4, 0),
    "synchronization": lambda _, stream: stream.is_done(),
    "synchronization of another stream": lambda device, _: device.check("do", device.driver.cuMemGetInfo),
    "loading": lambda device, _: device.check("do", device.driver.cuModuleLoadData, b"kernel"),
    "legacy stream": lambda device, _: device.check("do", device.driver.cuMemsetD8Async, 1 << 40, 0, 4, 0),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_a_capture_forbids_ends_it_and_leaves_the_stream_usable(
    driver: SimDriver, device: Device, what: str
) -> None:
    stream, block = device.stream(), device.allocate(4, "test")

    def record(stream: Stream) -> None:
        stream.fill(block.address, 1, 4)
        FORBIDDEN[what](device, stream)

    with pytest.raises((DeviceError, SimError), match=r"CAPTURE_UNSUPPORTED|CAPTURE_IMPLICIT|legacy|bounds"):
        capture(stream, record, "a graph")
    stream.fill(block.address, 2, 4)
    stream.wait("the stream")
    assert numbers(driver, block.address, 1)[0] == 0x02020202
    assert not [one for one in driver.alive() if "graph" in one]


def test_a_forbidden_call_that_was_ignored_fails_at_the_end(device: Device) -> None:
    stream = device.stream()
    with pytest.raises(DeviceError, match="CAPTURE_INVALIDATED"):
        capture(stream, lambda stream: device.driver.cuMemAlloc(4), "a graph")


def test_work_of_a_library_is_captured_and_refused_like_any_other(driver: SimDriver, device: Device) -> None:
    stream = device.stream()
    ran: list[str] = []

    def record(stream: Stream) -> None:
        put(driver, stream, lambda: ran.append("ours"))

    def spoil(stream: Stream) -> None:
        device.driver.cuMemAlloc(4)
        assert not driver.submit(stream.address, "ours", lambda: None)

    graph = capture(stream, record, "a graph")
    for _ in range(2):
        graph.launch(stream)
    stream.wait("the graphs")
    assert ran == ["ours"] * 2
    with pytest.raises(DeviceError, match="CAPTURE_INVALIDATED"):
        capture(stream, spoil, "a graph")
    driver.faults.calls["ours"] = Status.CUDA_ERROR_UNKNOWN
    assert not driver.submit(stream.address, "ours", lambda: None)


def test_a_fork_must_be_joined(driver: SimDriver, device: Device) -> None:
    stream, side, forked, joined = device.stream(), device.stream(), device.event(), device.event()
    ran: list[str] = []

    def fork(stream: Stream) -> None:
        stream.record(forked)
        side.after(forked)
        put(driver, side, lambda: ran.append("side"))

    def fork_and_join(stream: Stream) -> None:
        fork(stream)
        side.record(joined)
        put(driver, stream, lambda: ran.append("main"))
        stream.after(joined)

    with pytest.raises(DeviceError, match="CAPTURE_UNJOINED"):
        capture(stream, fork, "a graph")
    graph = capture(stream, fork_and_join, "a graph")
    assert not ran, "what is captured does not run"
    graph.launch(stream)
    stream.wait("the graph")
    assert sorted(ran) == ["main", "side"]


def test_an_edge_from_outside_a_capture_is_refused(device: Device) -> None:
    stream, side, event = device.stream(), device.stream(), device.event()
    side.record(event)
    with pytest.raises(DeviceError, match="CAPTURE_ISOLATION"):
        capture(stream, lambda stream: stream.after(event), "a graph")


def test_a_replay_reads_the_same_addresses_again(driver: SimDriver, device: Device) -> None:
    stream, pinned = device.stream(), device.allocate_pinned(4, "test")
    source, target = device.allocate(4, "test"), device.allocate(4, "test")
    graph = capture(stream, lambda stream: stream.copy(target.address, source.address, 4), "a graph")
    for value in (3, 4):
        pinned.view[:] = value
        stream.upload(source.address, pinned.address, 4)
        graph.launch(stream)
        stream.wait("the graph")
        assert numbers(driver, target.address, 1)[0] == value * 0x01010101
    source.close()
    graph.launch(stream)
    with pytest.raises(SimError, match="after it was freed"):
        stream.wait("a graph over freed memory")


def test_graphs_take_memory_until_they_are_destroyed(device: Device) -> None:
    stream, block = device.stream(), device.allocate(4, "test")
    before = device.memory().free
    graph = capture(stream, lambda stream: stream.fill(block.address, 0, 4), "a graph")
    assert device.memory().free < before
    graph.close()
    assert device.memory().free == before


def test_a_full_device_says_so(device: Device) -> None:
    device.allocate(1 << 19, "half")
    with pytest.raises(DeviceError, match=r"for the rest: cuMemAlloc returned CUDA_ERROR_OUT_OF_MEMORY .*kv_tokens"):
        device.allocate((1 << 19) + 1, "the rest")


def launch(driver: SimDriver, stream: Stream, kernel: SimKernel, pointers: tuple[int, ...], shared: int = 0) -> None:
    import ctypes

    (_, module) = driver.cuModuleLoadData(kernel.name.encode())
    (_, function) = driver.cuModuleGetFunction(module, kernel.name.encode())
    values = (ctypes.c_void_p * len(pointers))(*pointers)
    places = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(values) + 8 * n for n in range(len(pointers))))
    arguments = (1, 1, 1, 32, 1, 1, shared, stream.raw, ctypes.addressof(places), 0)
    stream.device.check("launch", driver.cuLaunchKernel, function, *arguments)


def test_a_launch_keeps_its_pointers_and_is_checked(driver: SimDriver, device: Device) -> None:
    stream, block, seen = device.stream(), device.allocate(64, "test"), []
    kernel = driver.kernels.register(SimKernel("k", lambda memory, grid, pointers: seen.append(pointers), 2))
    launch(driver, stream, kernel, (block.address, 0))
    stream.wait("the kernel")
    assert seen == [(block.address, 0)]
    with pytest.raises(SimError, match="16-byte aligned"):
        launch(driver, stream, kernel, (block.address + 8, 0))
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
        launch(driver, stream, kernel, (block.address, 0), shared=64 << 10)
    hidden = driver.kernels.register(SimKernel("h", lambda memory, grid, pointers: None, 1, num_hidden_pointers=1))
    with pytest.raises(SimError, match="must be null"):
        launch(driver, stream, hidden, (block.address, block.address))


def test_a_slow_kernel_takes_its_time_and_a_hung_one_is_given_up(driver: SimDriver, device: Device) -> None:
    stream = device.stream()
    slow = driver.kernels.register(SimKernel("slow", lambda memory, grid, pointers: None, 1, seconds=2.0))
    hung = driver.kernels.register(SimKernel("hung", lambda memory, grid, pointers: None, 1, seconds=float("inf")))
    driver.clock.pace = 1000.0
    launch(driver, stream, slow, (0,))
    began = driver.clock.now()
    stream.wait("the slow kernel")
    assert driver.clock.now() - began >= 2.0
    launch(driver, stream, hung, (0,))
    began = driver.clock.now()
    with pytest.raises(DeviceError, match=r"the step did not end within 5 s: the GPU hangs"):
        stream.wait("the step", 5.0)
    assert 5.0 <= driver.clock.now() - began < 5.1
    with pytest.raises(DeviceError, match="hangs"):
        device.close()
    assert "context" in driver.alive(), "a hung GPU is left alone: any call could block"


def test_a_crashed_kernel_ends_everything_but_closing(driver: SimDriver, device: Device) -> None:
    stream = device.stream()
    kernel = driver.kernels.register(SimKernel("bad", lambda memory, grid, pointers: None, 1, crashes=True))
    launch(driver, stream, kernel, (0,))
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_LAUNCH_FAILED \(719, launch failed\): .*restart"):
        stream.wait("the kernel")
    with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED"):
        device.allocate(4, "test")
    with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED"):
        device.close()
    device.close()
    assert not driver.alive()


def test_calls_fail_by_number_and_by_name(driver: SimDriver, device: Device) -> None:
    driver.faults.at[driver.calls.total() + 2] = Status.CUDA_ERROR_UNKNOWN
    stream = device.stream()
    with pytest.raises(DeviceError, match="CUDA_ERROR_UNKNOWN"):
        device.stream()
    driver.faults.calls["cuMemAlloc"] = Status.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        device.allocate(4, "test")
    stream.close()
    device.close()
    assert not driver.alive()
    assert not driver.abandoned


def test_a_second_gpu_is_there_only_if_it_was_asked_for() -> None:
    with pytest.raises(DeviceError, match="INVALID_DEVICE"):
        Device(1, SimDriver())
    Device(1, SimDriver(num_devices=2)).close()

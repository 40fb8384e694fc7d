"""Thin handles over the CUDA driver: device, streams, events, memory (made at start; a few calls a step).

Every call goes through `check`. Handles are given back explicitly, newest first, by `Device.close`. The driver's
module is injected, so that this file imports, and is tested, where no driver is.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.errors import DeviceError
from ostinato.plugins.cubin import cuda_driver

from .cuda_call import ask, check, name_and_capability, refusal

WAIT_LIMIT_S = 30.0  # no step takes that long: what does is hung
_SPIN_S, _NAP_S = 200e-6, 50e-6  # poll at once for a moment, then let other threads run


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the whole GPU, whoever uses them."""

    free: int
    total: int


class Device:
    """One GPU through its primary context, current in the thread that makes this; other threads `make_current` first.

    `clock`, `sleep`: seconds; what bounded waits go by. Raises DeviceError.
    """

    def __init__(
        self,
        ordinal: int = 0,
        driver: Any = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.driver = driver = cuda_driver() if driver is None else driver
        self.check = partial(check, driver)
        self._clock, self._sleep = clock, sleep
        self._open: dict[Handle, None] = {}
        self._context: Any = None
        self.is_sealed = False
        self.is_capturing = False
        self.check("start CUDA", driver.cuInit, 0)
        (version,) = self.check("ask for the driver's version", driver.cuDriverGetVersion)
        self.driver_version = (version // 1000, version % 1000 // 10)  # the CUDA version that it serves
        (self._device,) = self.check(f"find GPU {ordinal}", driver.cuDeviceGet, ordinal)
        self.name, self.compute_capability = name_and_capability(driver, self._device)
        (self._context,) = self.check(f"use {self.name}", driver.cuDevicePrimaryCtxRetain, self._device)
        try:
            self.make_current()
        except DeviceError:
            self.close()
            raise

    def make_current(self) -> None:
        """Use this device in the calling thread."""
        self.check(f"use {self.name}", self.driver.cuCtxSetCurrent, self._context)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(*self.check("ask for free memory", self.driver.cuMemGetInfo))

    def allocate(self, num_bytes: int, what: str) -> DeviceBuffer:
        """Device memory, its content undefined; `what` it is for is named if there is none."""
        self.assert_may_allocate(what)
        call = self.driver.cuMemAlloc
        (raw,) = self.check(f"allocate {num_bytes} bytes of GPU memory for {what}", call, num_bytes)
        return DeviceBuffer(self, raw, what, num_bytes)

    def allocate_pinned(self, num_bytes: int, what: str) -> PinnedBuffer:
        """Host memory that copies need not stage; its content is undefined."""
        self.assert_may_allocate(what)
        call = self.driver.cuMemHostAlloc
        (raw,) = self.check(f"allocate {num_bytes} bytes of pinned memory for {what}", call, num_bytes, 0)
        return PinnedBuffer(self, raw, what, num_bytes)

    def stream(self) -> Stream:
        """A stream that never waits for the legacy one."""
        self.assert_may_allocate("a stream")
        flag = self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        (raw,) = self.check("make a stream", self.driver.cuStreamCreate, int(flag))
        return Stream(self, raw, "a stream", self.driver.cuStreamDestroy)

    def event(self) -> Event:
        """An event that orders and is waited for, without timing."""
        self.assert_may_allocate("an event")
        flag = self.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        (raw,) = self.check("make an event", self.driver.cuEventCreate, int(flag))
        return Event(self, raw, "an event", self.driver.cuEventDestroy)

    def seal(self) -> None:
        """From now on nothing is allocated: serving replays."""
        self.is_sealed = True

    def assert_may_allocate(self, what: str) -> None:
        assert not self.is_sealed, f"{what} is allocated after the device is ready"
        assert not self.is_capturing, f"{what} is allocated while a graph is captured"

    def adopt(self, handle: Handle) -> None:
        self._open[handle] = None

    def release(self, handle: Handle) -> None:
        del self._open[handle]

    def wait_until(self, is_done: Callable[[], bool], what: str, limit_s: float) -> None:
        """Poll, so that a hung GPU ends in a DeviceError and not in a thread that never comes back."""
        assert not self.is_capturing, f"{what} is waited for while a graph is captured"
        if is_done():
            return
        began = self._clock()
        while not is_done():
            waited = self._clock() - began
            if waited > limit_s:
                raise DeviceError(
                    f"{what} did not end within {limit_s:g} s: the GPU hangs; restart the server, and see nvidia-smi "
                    "and dmesg"
                )
            self._sleep(0.0 if waited < _SPIN_S else _NAP_S)

    def drain(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait until no stream has work left, be it done or failed. Raises DeviceError only if the GPU hangs."""
        for stream in [handle for handle in self._open if isinstance(handle, Stream)]:
            self.wait_until(partial(stream.is_done, or_lost=True), "the work on the GPU", limit_s)

    @property
    def is_closed(self) -> bool:
        return self._context is None

    def is_lost(self) -> bool:
        """Whether the context will never work again: it fails when it is asked, and once more."""
        asked = (ask("ask for free memory", self.driver.cuMemGetInfo) for _ in range(2))
        return all(int(status) for status, _ in asked)

    def close(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Give everything back, newest first, when the streams are done; raises the first DeviceError at the end.

        What the driver does not take back is tried once more, then goes with the context. A GPU that hangs is left as
        it is: any call could block, and the memory comes back when the process ends.
        """
        if self._context is None:
            return
        self.drain(limit_s)
        failures: dict[Handle | None, DeviceError] = {}
        for _ in range(2):
            failures.clear()
            for handle in reversed(list(self._open)):
                try:
                    handle.close()
                except DeviceError as error:
                    failures[handle] = error
        try:
            self.check(f"let go of {self.name}", self.driver.cuDevicePrimaryCtxRelease, self._device)
        except DeviceError as error:
            failures[None] = error
        else:
            self._context = None
            for handle in list(self._open):
                handle.forget()
        if failures:
            raise next(iter(failures.values()))


class Handle:
    """Something of the driver's, to be given back once with `destroy`; `close` again does nothing."""

    def __init__(self, device: Device, raw: Any, what: str, destroy: Any) -> None:
        self.device, self._raw, self._what, self._destroy = device, raw, what, destroy
        device.adopt(self)

    @property
    def raw(self) -> Any:
        """As the driver takes it. None in its place would mean the legacy stream, hence the check."""
        assert self._raw is not None, f"{self._what} is used after it was closed"
        return self._raw

    def close(self) -> None:
        if self._raw is not None:
            self.device.check(f"free {self._what}", self._destroy, self._raw)
            self.forget()

    def forget(self) -> None:
        """It is gone."""
        self._raw = None
        self.device.release(self)


class DeviceBuffer(Handle):
    """Device memory: `address`, `num_bytes`."""

    def __init__(self, device: Device, raw: Any, what: str, num_bytes: int) -> None:
        super().__init__(device, raw, what, device.driver.cuMemFree)
        self.address, self.num_bytes = int(raw), num_bytes


class PinnedBuffer(Handle):
    """Pinned host memory: `address`, and `view`, its bytes, which must not be used after `close`."""

    def __init__(self, device: Device, raw: Any, what: str, num_bytes: int) -> None:
        super().__init__(device, raw, what, device.driver.cuMemFreeHost)
        self.address, self.num_bytes = int(raw), num_bytes
        self.view: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(self.address))


class Event(Handle):
    """A place in a stream, once recorded."""

    def is_done(self) -> bool:
        """Whether everything before the last record is done; True if it was never recorded. Raises DeviceError."""
        return _is_done(self.device, self.device.driver.cuEventQuery, self.raw)

    def wait(self, what: str, limit_s: float = WAIT_LIMIT_S) -> None:
        """Block until then; `what` names the work in the DeviceError of a GPU that failed or hangs."""
        self.device.wait_until(self.is_done, what, limit_s)


class Stream(Handle):
    """Work in order. Addresses are integers, sizes bytes; nothing here waits, but for `wait`.

    Host memory is pinned and is read or written when the copy runs: leave it alone until an event after it is done.
    """

    @property
    def address(self) -> int:
        """As TensorRT and a `Launcher` take it."""
        return int(self.raw)

    def upload(self, target: int, source: int, num_bytes: int) -> None:
        """Host → device."""
        self._put("upload", self.device.driver.cuMemcpyHtoDAsync, target, source, num_bytes)

    def download(self, target: int, source: int, num_bytes: int) -> None:
        """Device → host."""
        self._put("download", self.device.driver.cuMemcpyDtoHAsync, target, source, num_bytes)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Device → device."""
        self._put("copy", self.device.driver.cuMemcpyDtoDAsync, target, source, num_bytes)

    def fill(self, target: int, byte: int, num_bytes: int) -> None:
        self._put("fill", self.device.driver.cuMemsetD8Async, target, byte, num_bytes)

    def fill_words(self, target: int, word: int, num_words: int) -> None:
        """Four bytes at a time."""
        function = self.device.driver.cuMemsetD32Async
        self.device.check(f"fill {num_words} words", function, target, word, num_words, self.raw)

    def record(self, event: Event) -> None:
        """Everything on the stream so far is before `event`."""
        device = self.device
        device.check("record an event", device.driver.cuEventRecord, event.raw, self.raw)

    def after(self, event: Event) -> None:
        """What comes next on the stream waits, on the device, for the event as it was last recorded."""
        self.device.check("order two streams", self.device.driver.cuStreamWaitEvent, self.raw, event.raw, 0)

    def is_done(self, *, or_lost: bool = False) -> bool:
        """Whether everything on it is done; `or_lost`: or will never be. Raises DeviceError if something failed."""
        if or_lost:
            not_ready = self.device.driver.CUresult.CUDA_ERROR_NOT_READY
            statuses = (ask("ask for a stream", self.device.driver.cuStreamQuery, self.raw)[0] for _ in range(2))
            return next((not int(status) for status in statuses if status in (0, not_ready)), True)
        return _is_done(self.device, self.device.driver.cuStreamQuery, self.raw)

    def wait(self, what: str, limit_s: float = WAIT_LIMIT_S) -> None:
        """Block until it is empty."""
        self.device.wait_until(self.is_done, what, limit_s)

    def _put(self, what: str, function: Any, target: int, content: int, count: int) -> None:
        self.device.check(f"{what} {count} bytes", function, target, content, count, self.raw)


def _is_done(device: Device, function: Any, raw: Any) -> bool:
    status, _ = ask("ask whether work is done", function, raw)
    if not int(status):
        return True
    if status != device.driver.CUresult.CUDA_ERROR_NOT_READY:
        raise refusal(device.driver, "finish the work on the GPU", function.__name__, status)
    return False

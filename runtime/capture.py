"""Captures what is put on a stream as a graph, and launches it (captured at start, launched per step)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cuda import Device, Handle, Stream
from .cuda_call import ask


class Graph(Handle):
    """What was captured; only good to be instantiated."""

    def instantiate(self) -> ReadyGraph:
        """The driver's checked, launchable copy."""
        (raw,) = self.device.check(f"instantiate {self._what}", self.device.driver.cuGraphInstantiate, self.raw, 0)
        return ReadyGraph(self.device, raw, self._what, self.device.driver.cuGraphExecDestroy)


class ReadyGraph(Handle):
    """A graph to launch again and again: it reads and writes the addresses that it was captured with."""

    def __init__(self, device: Device, raw: Any, what: str, destroy: Any) -> None:
        super().__init__(device, raw, what, destroy)
        self._launching = f"launch {what}"

    def upload(self, stream: Stream) -> None:
        """Put it on the device now, so that the first launch is as quick as the others."""
        self.device.check(f"upload {self._what}", self.device.driver.cuGraphUpload, self.raw, stream.raw)

    def launch(self, stream: Stream) -> None:
        device = self.device
        device.check(self._launching, device.driver.cuGraphLaunch, self.raw, stream.raw)


def capture(stream: Stream, record: Callable[[Stream], None], what: str) -> ReadyGraph:
    """Capture what `record` puts on the stream, and ready it there. `what` names it in errors.

    Other threads may go on using the device. When anything fails, DeviceError or not, what was captured is discarded,
    nothing of it has run, and the stream is as it was.
    """
    device = stream.device
    device.assert_may_allocate(what)
    mode = device.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    device.check(f"begin to capture {what}", device.driver.cuStreamBeginCapture, stream.raw, mode)
    device.is_capturing = True
    try:
        record(stream)
        (raw,) = device.check(f"capture {what}", device.driver.cuStreamEndCapture, stream.raw)
    except BaseException:
        _discard(stream)
        raise
    finally:
        device.is_capturing = False
    graph = Graph(device, raw, what, device.driver.cuGraphDestroy)
    try:
        ready = graph.instantiate()
    finally:
        graph.close()
    try:
        ready.upload(stream)
    except BaseException:
        ready.close()
        raise
    return ready


def _discard(stream: Stream) -> None:
    """End a capture that failed; the driver has said why, so what it says now is of no use."""
    driver = stream.device.driver
    status, values = ask("end a failed capture", driver.cuStreamEndCapture, stream.raw)
    if not int(status) and values[0] is not None:
        ask("discard a failed capture", driver.cuGraphDestroy, values[0])

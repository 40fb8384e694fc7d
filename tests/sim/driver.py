"""A simulated GPU behind the part of cuda-python's driver module that the project uses; stricter than a real one.

Statuses, enums and handles are cuda-python's own. What a real device reports, this reports; what it punishes only
sometimes (see `SimError`) is raised at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver as real
from cuda.bindings.driver import CUresult as Status

from .capture import SimEvent, SimGraph, SimStream
from .core import RefusedError, SimCore, call
from .kernels import SimKernel
from .memory import SimError, poison

_GRAPH_BYTES, _NODE_BYTES = 64 << 10, 8 << 10
_MAX_GRID, _MAX_THREADS = (2**31 - 1, 65535, 65535), 1024
_DEVICE = real.CUdevice(0)


class SimDriver(SimCore):
    """Takes the place of `cuda.bindings.driver`."""

    CUresult = real.CUresult
    CUstream = real.CUstream
    CUdevice_attribute = real.CUdevice_attribute
    CUfunction_attribute = real.CUfunction_attribute
    CUstream_flags = real.CUstream_flags
    CUevent_flags = real.CUevent_flags
    CUstreamCaptureMode = real.CUstreamCaptureMode
    capability = (9, 0)

    def cuGetErrorString(self, error: Status) -> tuple[Any, ...]:  # noqa: N802
        return Status.CUDA_SUCCESS, error.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()

    @call(needs_context=False)
    def cuInit(self, Flags: int) -> None:  # noqa: N802, N803
        assert Flags == 0

    @call(1, needs_context=False)
    def cuDriverGetVersion(self) -> int:  # noqa: N802
        return 13020

    @call(1, needs_context=False)
    def cuDeviceGet(self, ordinal: int) -> Any:  # noqa: N802
        if not 0 <= ordinal < self.num_devices:
            raise RefusedError(Status.CUDA_ERROR_INVALID_DEVICE)
        return real.CUdevice(ordinal)

    @call(1, needs_context=False)
    def cuDeviceGetName(self, length: int, dev: Any) -> bytes:  # noqa: N802
        return b"Simulated GPU".ljust(length, b"\0")

    @call(1, needs_context=False)
    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> int:  # noqa: N802
        major = real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        return self.capability[0 if attrib == major else 1]

    @call(1, needs_context=False)
    def cuDevicePrimaryCtxRetain(self, dev: Any) -> Any:  # noqa: N802
        self.contexts += 1
        return real.CUcontext(0x1000)

    @call(needs_context=False)
    def cuDevicePrimaryCtxRelease(self, dev: Any) -> None:  # noqa: N802
        self.contexts -= 1
        if not self.contexts:  # what is left goes with it
            self.abandoned += self.alive()
            self.timeline.drop()
            for address in self.memory.live:
                self.memory.give_back(address)
            for address in self.host.live:
                self.host.free(address)
            self.live.clear()

    @call(needs_context=False)
    def cuCtxSetCurrent(self, ctx: Any) -> None:  # noqa: N802
        self.set_current(int(ctx) == 0x1000)

    @call(1)
    def cuCtxGetDevice(self) -> Any:  # noqa: N802
        return _DEVICE

    @call(2)
    def cuMemGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return self.memory.capacity - self.memory.used - self.graph_bytes, self.memory.capacity

    @call(1)
    def cuMemAlloc(self, bytesize: int) -> Any:  # noqa: N802
        if bytesize <= 0:
            raise RefusedError(Status.CUDA_ERROR_INVALID_VALUE)
        self.num_allocations += 1
        if (address := self.memory.allocate(bytesize)) is None:
            raise RefusedError(Status.CUDA_ERROR_OUT_OF_MEMORY)
        return real.CUdeviceptr(address)

    @call()
    def cuMemFree(self, dptr: Any) -> None:  # noqa: N802
        self.memory.give_back(int(dptr))

    @call(1)
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:  # noqa: N802, N803
        if bytesize <= 0 or Flags:
            raise RefusedError(Status.CUDA_ERROR_INVALID_VALUE)
        self.num_allocations += 1
        return self.host.allocate(bytesize)

    @call()
    def cuMemFreeHost(self, p: int) -> None:  # noqa: N802
        self.host.free(int(p))

    @call(may_be_captured=True)
    def cuMemcpyHtoDAsync(self, dstDevice: Any, srcHost: int, ByteCount: int, hStream: Any) -> None:  # noqa: N802, N803
        target, source = (self.memory, int(dstDevice)), (self.host, int(srcHost))
        self._copy("upload", target, source, ByteCount, hStream)

    @call(may_be_captured=True)
    def cuMemcpyDtoHAsync(self, dstHost: int, srcDevice: Any, ByteCount: int, hStream: Any) -> None:  # noqa: N802, N803
        target, source = (self.host, int(dstHost)), (self.memory, int(srcDevice))
        self._copy("download", target, source, ByteCount, hStream)

    @call(may_be_captured=True)
    def cuMemcpyDtoDAsync(self, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:  # noqa: N802, N803
        target, source = (self.memory, int(dstDevice)), (self.memory, int(srcDevice))
        self._copy("copy", target, source, ByteCount, hStream)

    def _copy(self, what: str, target: Any, source: Any, num_bytes: int, stream: Any) -> None:
        """Both ends are looked at now and again when it runs; host bytes that a download will write are poison now."""
        (into, address), (out_of, origin) = target, source
        into.bytes_at(address, num_bytes, what)
        out_of.bytes_at(origin, num_bytes, what)

        def run() -> None:
            into.bytes_at(address, num_bytes, what)[:] = out_of.bytes_at(origin, num_bytes, what)

        def await_content() -> None:
            poison(self.host.bytes_at(address, num_bytes, what))

        self.enqueue(stream, what, run, await_content if into is self.host else None)

    @call(may_be_captured=True)
    def cuMemsetD8Async(self, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:  # noqa: N802, N803
        self._fill(int(dstDevice), np.array([uc], np.uint8), N, hStream)

    @call(may_be_captured=True)
    def cuMemsetD32Async(self, dstDevice: Any, ui: int, N: int, hStream: Any) -> None:  # noqa: N802, N803
        if int(dstDevice) % 4:
            raise RefusedError(Status.CUDA_ERROR_INVALID_VALUE)
        self._fill(int(dstDevice), np.array([ui], np.uint32), N, hStream)

    def _fill(self, address: int, value: Any, count: int, stream: Any) -> None:
        num_bytes = count * value.itemsize

        def run() -> None:
            self.memory.bytes_at(address, num_bytes, "fill").view(value.dtype)[:] = value

        self.memory.bytes_at(address, num_bytes, "fill")
        self.enqueue(stream, "fill", run)

    @call(1)
    def cuStreamCreate(self, Flags: int) -> Any:  # noqa: N802, N803
        if Flags != int(real.CUstream_flags.CU_STREAM_NON_BLOCKING):
            raise SimError("a stream that waits for the legacy one is made")
        stream = SimStream(0)
        stream.number = self.make("stream", stream)
        return real.CUstream(stream.number)

    @call()
    def cuStreamDestroy(self, hStream: Any) -> None:  # noqa: N802, N803
        last = self.thing("stream", hStream).last
        if last is not None and not last.is_done:
            raise SimError("a stream is destroyed before its work is done")
        self.unmake("stream", hStream)

    @call()
    def cuStreamQuery(self, hStream: Any) -> None:  # noqa: N802, N803
        self._query(self.stream(hStream).last)

    @call(may_be_captured=True)
    def cuStreamWaitEvent(self, hStream: Any, hEvent: Any, Flags: int) -> None:  # noqa: N802, N803
        assert Flags == 0
        self.order(self.stream(hStream), self.thing("event", hEvent))

    @call(1)
    def cuEventCreate(self, Flags: int) -> Any:  # noqa: N802, N803
        return real.CUevent(self.make("event", SimEvent()))

    @call()
    def cuEventDestroy(self, hEvent: Any) -> None:  # noqa: N802, N803
        self.unmake("event", hEvent)

    @call(may_be_captured=True)
    def cuEventRecord(self, hEvent: Any, hStream: Any) -> None:  # noqa: N802, N803
        self.record(self.thing("event", hEvent), self.stream(hStream))

    @call()
    def cuEventQuery(self, hEvent: Any) -> None:  # noqa: N802, N803
        event: SimEvent = self.thing("event", hEvent)
        if event.capture is not None:
            raise RefusedError(Status.CUDA_ERROR_CAPTURED_EVENT)
        self._query(event.op)

    def _query(self, op: Any) -> None:
        is_done = self.timeline.ask(op)
        if self.faults.lost is not None:
            raise RefusedError(self.faults.lost)
        if not is_done:
            raise RefusedError(Status.CUDA_ERROR_NOT_READY)

    @call(may_be_captured=True)
    def cuStreamBeginCapture(self, hStream: Any, mode: Any) -> None:  # noqa: N802, N803
        assert mode == real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        if self.capture_here() is not None:
            raise RefusedError(Status.CUDA_ERROR_ILLEGAL_STATE)
        self.begin_capture(self.stream(hStream))

    @call(1, may_be_captured=True)
    def cuStreamEndCapture(self, hStream: Any) -> Any:  # noqa: N802, N803
        return real.CUgraph(self.make("graph", self.end_capture(self.stream(hStream))))

    @call(1)
    def cuGraphInstantiate(self, hGraph: Any, flags: int) -> Any:  # noqa: N802, N803
        assert flags == 0
        graph = SimGraph(self.thing("graph", hGraph).nodes)
        self.graph_bytes += self._graph_bytes(graph)
        return real.CUgraphExec(self.make("ready graph", graph))

    @staticmethod
    def _graph_bytes(graph: SimGraph) -> int:
        return _GRAPH_BYTES + len(graph.nodes) * _NODE_BYTES

    @call()
    def cuGraphDestroy(self, hGraph: Any) -> None:  # noqa: N802, N803
        self.unmake("graph", hGraph)

    @call()
    def cuGraphUpload(self, hGraphExec: Any, hStream: Any) -> None:  # noqa: N802, N803
        self.thing("ready graph", hGraphExec)
        self.stream(hStream)

    @call()
    def cuGraphLaunch(self, hGraphExec: Any, hStream: Any) -> None:  # noqa: N802, N803
        self.launch_graph(self.thing("ready graph", hGraphExec), self.stream(hStream))

    @call()
    def cuGraphExecDestroy(self, hGraphExec: Any) -> None:  # noqa: N802, N803
        graph: SimGraph = self.unmake("ready graph", hGraphExec)
        self.graph_bytes -= self._graph_bytes(graph)
        if graph.last is not None and not graph.last.is_done:
            raise SimError("a graph is destroyed before its launch is done")

    @call(1)
    def cuModuleLoadData(self, image: bytes) -> Any:  # noqa: N802
        kernel = self.kernels.at(image)
        if kernel is None:
            raise RefusedError(Status.CUDA_ERROR_INVALID_IMAGE)
        return real.CUmodule(self.make("module", kernel))

    @call(1)
    def cuModuleGetFunction(self, hmod: Any, name: bytes) -> Any:  # noqa: N802
        return real.CUfunction(int(hmod))  # one kernel a module, which it lives as long as

    @call()
    def cuModuleUnload(self, hmod: Any) -> None:  # noqa: N802
        self.unmake("module", hmod)

    @call()
    def cuFuncSetAttribute(self, hfunc: Any, attrib: Any, value: int) -> None:  # noqa: N802
        assert attrib == real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.thing("module", hfunc).shared_bytes = value

    @call(may_be_captured=True)
    def cuLaunchKernel(  # noqa: N802
        self, f: Any, gridDimX: int, gridDimY: int, gridDimZ: int, blockDimX: int, blockDimY: int,  # noqa: N803
        blockDimZ: int, sharedMemBytes: int, hStream: Any, kernelParams: int, extra: int,  # noqa: N803
    ) -> None:  # fmt: skip
        kernel: SimKernel = self.thing("module", f)
        grid, threads = (gridDimX, gridDimY, gridDimZ), blockDimX * blockDimY * blockDimZ
        fits = all(1 <= size <= limit for size, limit in zip(grid, _MAX_GRID, strict=True))
        if not fits or not 1 <= threads <= _MAX_THREADS or sharedMemBytes > kernel.shared_bytes or extra:
            raise RefusedError(Status.CUDA_ERROR_INVALID_VALUE)
        pointers = kernel.pointers(kernelParams)

        def run() -> None:
            if kernel.crashes:
                self.lose()
            else:
                kernel.body(self.memory, grid, pointers)

        self.enqueue(hStream, kernel.name, run, seconds=kernel.seconds)

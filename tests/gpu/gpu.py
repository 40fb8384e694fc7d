"""A GPU as the tests see it: arrays that live on it, kernels by their specs, torch on our stream, time (in tests).

`tests/gpu/rehearsed.py` has the same over the simulated driver, so that the tests' own code is run without a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ostinato.plugins.cubin import Cubins
from ostinato.plugins.kernel_launch import KernelSpec, Launch
from ostinato.plugins.launcher import Launcher
from ostinato.runtime.capture import capture
from ostinato.runtime.cuda import Device, DeviceBuffer, PinnedBuffer, Stream
from ostinato.runtime.step_layout import aligned

from .kernel_store import KernelStore

Array = NDArray[Any]
GUARD, GUARD_BYTE = 4096, 0xA5  # bytes between tensors that nobody may touch


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class Gpu:
    """The first GPU, through our own handles; everything is on one stream. `store`: where kernels are kept."""

    def __init__(self, store: KernelStore) -> None:
        self.store = store
        self.device = self.new_device()
        self.stream = self.device.stream()
        self.launcher: Launcher = self.new_launcher()

    def new_device(self) -> Device:
        """Another handle of the same GPU, to be sealed and closed on its own."""
        return Device()

    def new_launcher(self) -> Launcher:
        return Cubins(self.store.path, self.store.kernels, self.device.driver)

    def prepare(self, specs: Iterable[KernelSpec]) -> None:
        """Compile what is not kept, and load it."""
        wanted = list(specs)
        self.store.add(wanted, self.device.compute_capability)
        self.launcher.prepare(spec.name for spec in wanted)

    def spills(self, spec: KernelSpec) -> int:
        """Bytes a thread, of a prepared kernel."""
        return max(by_name[spec.name].spill_bytes for by_name in self.store.kernels.values() if spec.name in by_name)

    def see(self, sizes: Mapping[int, int]) -> None:
        """What the next launches are given: address → bytes. A real GPU takes addresses as they are."""

    def launch(self, launches: Sequence[Launch], addresses: Mapping[str, int], stream: Stream | None = None) -> None:
        """Prepared kernels, in order; pointers by name."""
        on = (stream or self.stream).address
        for launch in launches:
            pointers = [addresses[pointer.name] for pointer in launch.kernel.pointers]
            self.launcher.launch(launch.kernel.name, launch.grid, pointers, on)

    def put(self, arrays: Mapping[str, Array]) -> Tensors:
        return Tensors(self, arrays)

    def run(self, launches: Sequence[Launch], arrays: Mapping[str, Array]) -> dict[str, Array]:
        """All arrays as they are after the launches. Nothing outside of them may have changed."""
        self.prepare(launch.kernel for launch in launches)
        for launch in launches:
            for pointer in launch.kernel.pointers:
                found = arrays[pointer.name].dtype
                assert found == dtype_of(pointer.dtype), f"{pointer.name} is {found}, wanted is {pointer.dtype}"
        with self.put(arrays) as tensors:
            self.launch(launches, tensors.addresses)
            return tensors.read()

    def tensor(self, address: int, dtype: str, shape: tuple[int, ...]) -> Any:
        """Device memory as a torch tensor."""
        import torch

        kind = np.dtype("int16" if dtype == "bfloat16" else dtype)
        found = torch.as_tensor(_Memory(address, kind, shape), device="cuda")
        assert found.data_ptr() == address, "torch copied what it should share"
        return found.view(torch.bfloat16) if dtype == "bfloat16" else found

    def torch_device(self) -> str:
        return "cuda"

    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        """Let torch put its work on our stream."""
        import torch

        with torch.no_grad(), torch.cuda.stream(torch.cuda.ExternalStream(stream.address)):
            work()

    def seconds(self, record: Callable[[int], None], repeats: int, *, captured: bool = True) -> float:
        """Device time of one `record`: median of five runs of `repeats` of them, numbered, back to back.

        `captured`: replayed as one graph, so that the host's time for each launch is not in it.
        """
        graph = capture(self.stream, lambda _: _all(record, repeats), "a measure") if captured else None

        def run() -> None:
            if graph:
                graph.launch(self.stream)
            else:
                _all(record, repeats)

        run()
        self.stream.wait("a warm-up")
        taken = [self.elapsed(run) for _ in range(5)]
        if graph:
            graph.close()
        return statistics.median(taken) / repeats

    def elapsed(self, run: Callable[[], None]) -> float:
        """Device seconds between two events around what `run` puts on the stream."""
        driver, check = self.device.driver, self.device.check
        (begin,), (end,) = (check("make a timing event", driver.cuEventCreate, 0) for _ in range(2))
        try:
            check("record a timing event", driver.cuEventRecord, begin, self.stream.raw)
            run()
            check("record a timing event", driver.cuEventRecord, end, self.stream.raw)
            self.stream.wait("what is timed")
            (milliseconds,) = check("read a timing event", driver.cuEventElapsedTime, begin, end)
        finally:
            for event in (begin, end):
                check("free a timing event", driver.cuEventDestroy, event)
        return float(milliseconds) / 1e3

    def close(self) -> None:
        self.device.drain()
        if isinstance(self.launcher, Cubins):
            self.launcher.close()
        self.device.close()


class Tensors:
    """NumPy arrays copied to the device, guard bytes around each; a context that gives the memory back."""

    def __init__(self, gpu: Gpu, arrays: Mapping[str, Array]) -> None:
        self._gpu = gpu
        self._arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self._offsets: dict[str, int] = {}
        end = GUARD
        for name, array in self._arrays.items():
            self._offsets[name] = end
            end = aligned(end + array.nbytes) + GUARD
        self._block: DeviceBuffer = gpu.device.allocate(end, "tensors of a test")
        self._pinned: PinnedBuffer = gpu.device.allocate_pinned(end, "tensors of a test")
        self.addresses = {name: self._block.address + offset for name, offset in self._offsets.items()}
        self.sizes = {self.addresses[name]: array.nbytes for name, array in self._arrays.items()}
        gpu.see(self.sizes)
        self._pinned.view[:] = GUARD_BYTE
        for name, array in self._arrays.items():
            self._bytes(name)[:] = array.reshape(-1).view(np.uint8)
        gpu.stream.upload(self._block.address, self._pinned.address, end)
        gpu.stream.wait("the upload of a test's tensors")

    def read(self) -> dict[str, Array]:
        """Copies of all; the guards must stand."""
        self._gpu.stream.download(self._pinned.address, self._block.address, self._block.num_bytes)
        self._gpu.stream.wait("a test's kernels")
        found = {
            name: self._bytes(name).copy().view(array.dtype).reshape(array.shape)
            for name, array in self._arrays.items()
        }
        for name in self._arrays:
            self._bytes(name)[:] = GUARD_BYTE
        assert (self._pinned.view == GUARD_BYTE).all(), "a kernel wrote outside of its tensors"
        return found

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        start = self._offsets[name]
        return self._pinned.view[start : start + self._arrays[name].nbytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gpu.device.drain()
        self._pinned.close()
        self._block.close()


class _Memory:
    """Device memory as torch takes it over."""

    def __init__(self, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "typestr": dtype.str, "shape": shape, "strides": None, "version": 2,
        }  # fmt: skip


def _all(record: Callable[[int], None], repeats: int) -> None:
    for number in range(repeats):
        record(number)

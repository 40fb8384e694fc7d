"""The tests' GPU on the simulated driver: kernels run in Triton's interpreter, torch on the CPU (in tests)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ostinato.plugins.kernel_launch import KernelSpec, Launch
from ostinato.runtime.cuda import Device, Stream
from tests.interpreter import compiled_form, run_launches
from tests.sim.driver import SimDriver

from .gpu import Gpu, dtype_of
from .kernel_store import KernelStore, package_of


class RehearsedGpu(Gpu):
    """Nothing is compiled, nothing timed is of use; everything else is as on a GPU."""

    def __init__(self, store: KernelStore, seed: int | None = None) -> None:
        self.driver = SimDriver(seed=seed)
        super().__init__(store)

    def new_device(self) -> Device:
        return Device(driver=self.driver, clock=self.driver.clock.now, sleep=self.driver.clock.sleep)

    def new_launcher(self) -> Interpreter:
        return Interpreter(self.driver)

    def prepare(self, specs: Iterable[KernelSpec]) -> None:
        wanted = list(specs)
        for spec in wanted:
            assert isinstance(self.launcher, Interpreter)
            self.launcher.specs[spec.name] = spec
        self.launcher.prepare(spec.name for spec in wanted)

    def spills(self, spec: KernelSpec) -> int:
        return 0

    def see(self, sizes: Mapping[int, int]) -> None:
        assert isinstance(self.launcher, Interpreter)
        self.launcher.sizes = dict(sizes)

    def tensor(self, address: int, dtype: str, shape: tuple[int, ...]) -> Any:
        import torch

        array = self.driver.memory.view(address, "int16" if dtype == "bfloat16" else dtype, shape)
        found = torch.from_numpy(array)
        return found.view(torch.bfloat16) if dtype == "bfloat16" else found

    def torch_device(self) -> str:
        return "cpu"

    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        import torch

        def run() -> None:
            with torch.no_grad():
                work()

        assert self.driver.submit(stream.address, "torch", run)

    def elapsed(self, run: Callable[[], None]) -> float:
        began = time.perf_counter()
        run()
        self.stream.wait("what is timed")
        return time.perf_counter() - began


class Interpreter:
    """A `Launcher` whose kernels are interpreted when the stream comes to them."""

    def __init__(self, driver: SimDriver) -> None:
        self._driver = driver
        self.specs: dict[str, KernelSpec] = {}
        self.sizes: dict[int, int] = {}  # address → bytes, of what is launched next

    def prepare(self, kernels: Iterable[str]) -> None:
        for name in kernels:
            compiled_form(self.specs[name], package_of(self.specs[name]))  # the kernel takes what the spec gives

    def launch(self, kernel: str, grid: tuple[int, int, int], pointers: Sequence[int], stream: int) -> None:
        spec = self.specs[kernel]
        assert len(pointers) == len(spec.pointers)
        sizes = [self.sizes[pointer] for pointer in pointers]

        def run() -> None:
            arrays = {}
            for pointer, address, size in zip(spec.pointers, pointers, sizes, strict=True):
                dtype = dtype_of(pointer.dtype)
                arrays[pointer.name] = self._driver.memory.view(address, dtype, (size // dtype.itemsize,))
            run_launches((Launch(spec, grid),), arrays, package_of(spec))

        assert self._driver.submit(stream, spec.function, run), "the simulated driver refuses the launch"

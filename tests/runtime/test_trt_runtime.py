"""The runtime over TensorRT, alone: what is refused when engines are loaded, bound and run, and with whose words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx

from ostinato.engines.engine_record import EngineInfo, EngineProfile, EngineTensor
from ostinato.engines.errors import BundleError, DeviceError
from ostinato.engines.program import StepShape
from ostinato.runtime.cuda import Device, Stream
from ostinato.runtime.trt import Engines, TensorRT, load_tensorrt
from tests.sim.driver import SimDriver
from tests.sim.tensorrt import EngineSpec, SimTensorRTRTX

DECODE, PREFILL = StepShape("decode", 2, 2), StepShape("prefill", 8, 4)
SIZES = {DECODE: {"T": 2}, PREFILL: {"T": 8}}
X, Y = EngineTensor("x", "float32", ("T", 4)), EngineTensor("y", "float32", ("T", 4))
PROFILES = (
    EngineProfile("decode", {"x": ((1, 4), (2, 4), (4, 4))}),
    EngineProfile("prefill", {"x": ((4, 4), (8, 4), (8, 4))}),
)
INFO = EngineInfo("double.engine", 6, (X,), (Y,), PROFILES, tensorrt_rtx.__version__)
IMAGE = b"double"


def double(inputs: Any, outputs: Any, collective: Any) -> None:
    outputs["y"][...] = 2 * inputs["x"]


class Bench:
    """One engine on a simulated device; `memory` of 64 KiB for everything."""

    def __init__(self, folder: Path) -> None:
        self.driver = SimDriver()
        self.device = Device(driver=self.driver, clock=self.driver.clock.now, sleep=self.driver.clock.sleep)
        self.stream: Stream = self.device.stream()
        self.memory = self.device.allocate(1 << 16, "the test").address
        self.module = SimTensorRTRTX(self.driver)
        self.module.register(IMAGE, EngineSpec("double", (X,), (Y,), PROFILES, double, (4096, 8192)))
        self.folder = folder
        (folder / INFO.file).write_bytes(IMAGE)

    def engines(self, info: EngineInfo = INFO) -> Engines:
        return Engines(TensorRT(self.module), self.folder, [info], SIZES)

    def view(self, offset: int, rows: int) -> np.ndarray[Any, Any]:
        return self.driver.memory.view(self.memory + offset, "float32", (rows, 4))

    def run(self, engines: Engines, shape: StepShape) -> np.ndarray[Any, Any]:
        self.view(0, shape.tokens)[...] = np.arange(shape.tokens * 4).reshape(-1, 4)
        engines.enqueue(INFO.file, shape, {"x": self.memory, "y": self.memory + 1024}, self.stream)
        self.stream.wait("the run")
        return self.view(1024, shape.tokens).copy()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_every_step_shape_runs_in_its_own_context(bench: Bench) -> None:
    engines = bench.engines()
    assert engines.num_bytes == 8192
    engines.give_memory(bench.memory + 4096, engines.num_bytes, bench.stream)
    made = bench.driver.num_allocations
    for shape in (DECODE, PREFILL, DECODE):
        assert (bench.run(engines, shape) == 2 * np.arange(shape.tokens * 4).reshape(-1, 4)).all()
    assert bench.driver.num_allocations == made
    engines.close()


@pytest.mark.parametrize("content", [b"", b"d", b"doubl", b"doublf", b"double "])
def test_a_damaged_engine_is_refused_with_the_library_s_own_words(bench: Bench, content: bytes) -> None:
    (bench.folder / INFO.file).write_bytes(content)
    with pytest.raises(BundleError, match=r"does not load .*double.engine \(.*damaged.*\): build the bundle again"):
        bench.engines()


def test_a_missing_engine_is_refused(bench: Bench) -> None:
    (bench.folder / INFO.file).unlink()
    with pytest.raises(BundleError, match=r"double.engine can't be read"):
        bench.engines()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda info: replace(info, inputs=()), "differ in tensors x"),
        (lambda info: replace(info, outputs=(replace(Y, name="z"),)), "differ in tensors y, z"),
        (lambda info: replace(info, profiles=PROFILES[:1]), "has 2 profiles, the manifest 1"),
    ],
)
def test_an_engine_that_the_manifest_does_not_tell_of_is_refused(
    bench: Bench, change: Callable[[EngineInfo], EngineInfo], told: str
) -> None:
    shapes = {DECODE: SIZES[DECODE]}
    with pytest.raises(BundleError, match=told):
        Engines(TensorRT(bench.module), bench.folder, [change(INFO)], shapes)


def test_every_false_is_raised_with_what_was_logged(bench: Bench) -> None:
    engines = bench.engines()
    engines.give_memory(bench.memory + 4096, engines.num_bytes, bench.stream)
    with pytest.raises(DeviceError, match=r"TensorRT did not bind w of double.engine: .*there is no tensor w"):
        engines.enqueue(INFO.file, DECODE, {"w": bench.memory}, bench.stream)
    with pytest.raises(DeviceError, match=r"did not run double.engine in a step of decode 2: .*no address"):
        engines.enqueue(INFO.file, DECODE, {"x": bench.memory}, bench.stream)
    bench.module.faults.refused.add(bench.module.num_enqueues + 1)
    with pytest.raises(DeviceError, match=r"did not run double.engine in a step of decode 2: .*an error inside"):
        bench.run(engines, DECODE)
    assert bench.run(engines, DECODE)[1, 3] == 14  # the next one is right


def test_shapes_out_of_the_profiles_are_refused_at_start(bench: Bench) -> None:
    engines = Engines(TensorRT(bench.module), bench.folder, [INFO], {DECODE: {"T": 5}})
    with pytest.raises(DeviceError, match=r"did not take x as \[5, 4\] in double.engine: .*takes \[1, 4\] to \[4, 4\]"):
        engines.give_memory(bench.memory + 4096, 8192, bench.stream)


def test_too_little_memory_is_told(bench: Bench) -> None:
    engines = bench.engines()
    engines.give_memory(bench.memory + 4096, 256, bench.stream)
    with pytest.raises(DeviceError, match="activation memory of 256 bytes"):
        bench.run(engines, DECODE)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert load_tensorrt("rtx") is tensorrt_rtx
    with pytest.raises(DeviceError, match=r"tensorrt is not here \(.*\): install ostinato\[trt\]"):
        load_tensorrt("trt")


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("Runtime", "deserialize_cuda_engine"),
        ("Runtime", "engine_host_code_allowed"),
        ("ICudaEngine", "create_runtime_config"),
        ("ICudaEngine", "create_execution_context"),
        ("ICudaEngine", "get_device_memory_size_for_profile_v2"),
        ("ICudaEngine", "num_io_tensors"),
        ("ICudaEngine", "get_tensor_name"),
        ("ICudaEngine", "num_optimization_profiles"),
        ("IRuntimeConfig", "set_execution_context_allocation_strategy"),
        ("IRuntimeConfig", "cuda_graph_strategy"),
        ("IRuntimeConfig", "dynamic_shapes_kernel_specialization_strategy"),
        ("IExecutionContext", "set_device_memory"),
        ("IExecutionContext", "set_optimization_profile_async"),
        ("IExecutionContext", "set_input_shape"),
        ("IExecutionContext", "set_tensor_address"),
        ("IExecutionContext", "set_communicator"),
        ("IExecutionContext", "execute_async_v3"),
    ],
)
def test_the_real_library_has_what_is_called(where: str, name: str) -> None:
    assert hasattr(getattr(tensorrt_rtx, where), name)

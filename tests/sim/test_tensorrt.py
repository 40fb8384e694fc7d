"""The simulated TensorRT: what it refuses, what it punishes, and when what is enqueued runs."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from cuda.bindings.driver import CUresult as Status
from numpy.typing import NDArray

from ostinato.engines.engine_record import EngineProfile, EngineTensor

from .driver import SimDriver
from .memory import SimError
from .tensorrt import EngineSpec, SimTensorRTRTX

WIDTH = 64  # floats, so that a row is 256 bytes
PROFILES = tuple(
    EngineProfile(name, {"x": ((least, WIDTH), (most, WIDTH), (most, WIDTH)), "state": ((WIDTH,),) * 3})
    for name, least, most in (("decode", 1, 4), ("prefill", 8, 16))
)
MEMORY = (1024, 2048)


def plan(aliases: dict[str, str] | None = None) -> EngineSpec:
    """y = 2 x + state; of the state, everything is counted up by one where its output lies over it."""

    def compute(inputs: Any, outputs: Any, collective: Any) -> None:
        outputs["y"][...] = 2 * inputs["x"] + inputs["state"]
        outputs["state.out"][...] = inputs["state"] + 1

    tensors = EngineTensor("x", "float32", ("T", WIDTH)), EngineTensor("state", "float32", (WIDTH,))
    made = EngineTensor("y", "float32", ("T", WIDTH)), EngineTensor("state.out", "float32", (WIDTH,))
    return EngineSpec("double", tensors, made, PROFILES, compute, MEMORY, aliases or {"state.out": "state"})


class Bench:
    """An engine with a context, and memory to bind. `log`: TensorRT's errors."""

    def __init__(self, seed: int | None = None) -> None:
        self.driver: Any = SimDriver(seed=seed)  # its functions give what cuda-python's do, of many types
        self.module = SimTensorRTRTX(self.driver)
        self.module.register(b"plan", plan())
        self.driver.cuInit(0)
        self.driver.cuCtxSetCurrent(self.driver.cuDevicePrimaryCtxRetain(0)[1])
        self.streams = [int(self.driver.cuStreamCreate(1)[1]) for _ in range(2)]
        self.x, self.y, self.state, self.memory = (self.allocate(num_bytes) for num_bytes in (4096, 4096, 256, 2048))
        self.array(self.state, WIDTH)[:] = 0
        self.log: list[str] = []
        self.runtime = self.module.Runtime(self.logger())
        engine = self.runtime.deserialize_cuda_engine(b"plan")
        assert engine is not None
        self.engine = engine
        self.context = self.made()

    def logger(self) -> Any:
        log = self.log

        class Log(SimTensorRTRTX.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                SimTensorRTRTX.ILogger.__init__(self)

            def log(self, severity: Any, msg: str) -> None:
                log.append(msg)

        return Log()

    def allocate(self, num_bytes: int) -> int:
        return int(self.driver.cuMemAlloc(num_bytes)[1])

    def array(self, address: int, *shape: int) -> NDArray[Any]:
        array: NDArray[Any] = self.driver.memory.view(address, "float32", shape)
        return array

    def made(self) -> Any:
        config = self.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(self.module.ExecutionContextAllocationStrategy.USER_MANAGED)
        return self.engine.create_execution_context(config)

    def ready(self, rows: int = 2, profile: int = 0, context: Any = None) -> Any:
        """All that an enqueue needs; `x` holds ones."""
        context = context or self.context
        context.set_device_memory(self.memory, MEMORY[profile])
        assert context.set_optimization_profile_async(profile, self.streams[0])
        assert context.set_input_shape("x", (rows, WIDTH))
        for name, address in (("x", self.x), ("y", self.y), ("state", self.state), ("state.out", self.state)):
            assert context.set_tensor_address(name, address)
        self.array(self.x, rows, WIDTH)[:] = 1
        return context

    def wait(self, stream: int = 0) -> None:
        while self.driver.cuStreamQuery(self.streams[stream])[0] != Status.CUDA_SUCCESS:
            self.driver.clock.sleep(1e-3)

    def begin(self) -> None:
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        assert self.driver.cuStreamBeginCapture(self.streams[0], mode)[0] == Status.CUDA_SUCCESS

    def end(self) -> Any:
        """The captured graph, ready to launch."""
        status, graph = self.driver.cuStreamEndCapture(self.streams[0])
        assert status == Status.CUDA_SUCCESS, status
        return self.driver.cuGraphInstantiate(graph, 0)[1]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_work_is_deferred_and_keeps_the_addresses_of_its_enqueue(bench: Bench) -> None:
    context = bench.ready()
    assert context.execute_async_v3(bench.streams[0])
    other = bench.allocate(4096)
    assert context.set_tensor_address("y", other)
    assert context.execute_async_v3(bench.streams[0])
    assert np.isnan(bench.array(bench.y, 2, WIDTH)).all(), "nothing has run"
    bench.array(bench.x, 2, WIDTH)[:] = 3  # memory is read when the work runs
    bench.wait()
    assert (bench.array(bench.y, 2, WIDTH) == 6).all()
    assert (bench.array(other, 2, WIDTH) == 7).all(), "the state was counted up in place"
    assert np.isnan(bench.array(bench.memory, 256)).all(), "activations are left as poison"
    assert not bench.log


def test_queries_tell_of_tensors_and_profiles(bench: Bench) -> None:
    engine, trt = bench.engine, bench.module
    names = [engine.get_tensor_name(place) for place in range(engine.num_io_tensors)]
    assert names == ["x", "state", "y", "state.out"]
    assert [engine.get_tensor_mode(name) for name in names] == [trt.TensorIOMode.INPUT] * 2 + [
        trt.TensorIOMode.OUTPUT
    ] * 2
    assert engine.get_tensor_shape("y") == (-1, WIDTH)
    assert engine.get_tensor_dtype("y") == trt.DataType.FLOAT
    assert engine.get_tensor_profile_shape("x", 1) == [(8, WIDTH), (16, WIDTH), (16, WIDTH)]
    assert [engine.get_device_memory_size_for_profile_v2(place) for place in range(2)] == list(MEMORY)
    assert bench.ready(3).get_tensor_shape("y") == (3, WIDTH)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda b: b.context.set_tensor_address("y", 0), "no address was given for y"),
        (lambda b: b.context.set_optimization_profile_async(1, b.streams[0]), "no shape was given for x"),
        (lambda b: b.context.set_device_memory(b.memory, 512), "activation memory of 512 bytes"),
        (lambda b: b.context.set_tensor_address("state.out", b.y), "over which it writes"),
    ],
)
def test_an_enqueue_that_lacks_something_is_refused(bench: Bench, wrong: Any, reason: str) -> None:
    bench.ready()
    wrong(bench)
    assert bench.context.execute_async_v3(bench.streams[0]) is False
    assert reason in bench.log[-1]


def test_shapes_outside_the_profile_and_unknown_names_are_refused(bench: Bench) -> None:
    context = bench.ready()
    for shape in ((5, WIDTH), (0, WIDTH), (2, WIDTH + 1), (2,)):
        assert context.set_input_shape("x", shape) is False
    assert context.set_input_shape("y", (2, WIDTH)) is False
    assert context.set_tensor_address("z", bench.y) is False
    assert context.set_optimization_profile_async(2, bench.streams[0]) is False
    assert len(bench.log) == 7
    assert context.execute_async_v3(bench.streams[0]), "what was set before still holds"
    assert context.set_optimization_profile_async(1, bench.streams[0])
    assert context.infer_shapes() == ["x"]


def test_memory_that_is_crooked_or_too_small_is_an_error(bench: Bench) -> None:
    context = bench.ready()
    with pytest.raises(SimError, match="256-byte aligned"):
        context.set_tensor_address("y", bench.y + 16)
    with pytest.raises(SimError, match="256-byte aligned"):
        context.set_device_memory(bench.memory + 64, 1024)
    context.set_tensor_address("y", bench.state)
    with pytest.raises(SimError, match="out of device memory"):
        context.execute_async_v3(bench.streams[0])
    bench.ready().set_device_memory(bench.memory + 1536, 1024)
    with pytest.raises(SimError, match="activations"):
        context.execute_async_v3(bench.streams[0])


def test_memory_freed_before_the_work_runs_is_an_error(bench: Bench) -> None:
    assert bench.ready().execute_async_v3(bench.streams[0])
    bench.driver.cuMemFree(bench.y)
    with pytest.raises(SimError, match="after it was freed"):
        bench.wait()


@pytest.mark.parametrize("shared", ["context", "memory"])
def test_two_streams_at_once_need_an_order(bench: Bench, shared: str) -> None:
    first = bench.ready()
    assert first.execute_async_v3(bench.streams[0])
    second = first if shared == "context" else bench.made()
    if second is not first:
        assert second.set_input_shape("x", (2, WIDTH))
        second.set_device_memory(bench.memory, MEMORY[0])
        for name, address in (("x", bench.x), ("y", bench.y), ("state", bench.state), ("state.out", bench.state)):
            assert second.set_tensor_address(name, address)
    with pytest.raises(SimError, match=f"its {shared} is in use on another stream"):
        second.execute_async_v3(bench.streams[1])
    event = bench.driver.cuEventCreate(2)[1]
    bench.driver.cuEventRecord(event, bench.streams[0])
    bench.driver.cuStreamWaitEvent(bench.streams[1], event, 0)
    assert second.execute_async_v3(bench.streams[1])
    bench.wait(1)
    assert (bench.array(bench.y, 2, WIDTH) == 3).all(), "twice one, and the state that the first counted up"


def test_a_captured_enqueue_runs_at_each_launch(bench: Bench) -> None:
    context = bench.ready()
    assert context.execute_async_v3(bench.streams[0])  # outside first
    bench.begin()
    assert context.execute_async_v3(bench.streams[0])
    graph = bench.end()
    context.set_tensor_address("y", bench.allocate(4096))  # the graph keeps its own
    for _ in range(3):
        bench.driver.cuGraphLaunch(graph, bench.streams[0])
    bench.wait()
    assert (bench.array(bench.y, 2, WIDTH) == 5).all()
    assert (bench.module.num_enqueues, bench.module.num_runs) == (2, 4)


def test_shapes_must_settle_before_a_capture(bench: Bench) -> None:
    context = bench.ready()
    bench.begin()
    assert context.execute_async_v3(bench.streams[0]) is False
    assert bench.driver.cuStreamEndCapture(bench.streams[0])[0] == Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    assert "enqueue once before" in bench.log[-1]


@pytest.mark.parametrize("what", ["deserialize", "context", "profile"])
def test_what_may_not_be_captured_invalidates(bench: Bench, what: str) -> None:
    context = bench.ready()
    bench.begin()
    if what == "deserialize":
        assert bench.runtime.deserialize_cuda_engine(b"plan") is None
    elif what == "context":
        assert bench.made() is None
    else:
        assert context.set_optimization_profile_async(1, bench.streams[0]) is False
    assert bench.log
    assert bench.driver.cuStreamEndCapture(bench.streams[0])[0] == Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


@pytest.mark.parametrize("change", ["shape", "memory", "profile", "end"])
def test_a_graph_is_bound_to_its_contexts_state(bench: Bench, change: str) -> None:
    context = bench.ready()
    assert context.execute_async_v3(bench.streams[0])
    bench.begin()
    assert context.execute_async_v3(bench.streams[0])
    graph = bench.end()
    bench.wait()
    if change == "shape":
        assert context.set_input_shape("x", (3, WIDTH))
    elif change == "memory":
        context.set_device_memory(bench.allocate(2048), 2048)
    elif change == "profile":
        assert context.set_optimization_profile_async(1, bench.streams[0])
    else:
        del context, bench.context
    bench.driver.cuGraphLaunch(graph, bench.streams[0])
    with pytest.raises(SimError, match="graph"):
        bench.wait()


def test_bytes_that_are_no_engine_are_refused(bench: Bench) -> None:
    assert bench.runtime.deserialize_cuda_engine(b"plam") is None
    assert "damaged" in bench.log[-1]


def test_contexts_must_take_the_memory_that_they_are_given(bench: Bench) -> None:
    with pytest.raises(SimError, match="USER_MANAGED"):
        bench.engine.create_execution_context()
    config = bench.engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(bench.module.ExecutionContextAllocationStrategy.USER_MANAGED)
    config.cuda_graph_strategy = bench.module.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    with pytest.raises(SimError, match="graphs of its own"):
        bench.engine.create_execution_context(config)


def test_a_communicator_is_a_capsule(bench: Bench) -> None:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    assert bench.context.set_communicator(new(0x1234, None, None))
    with pytest.raises(TypeError):
        bench.context.set_communicator(0x1234)


def test_faults_strike_at_their_number(bench: Bench) -> None:
    context, faults = bench.ready(), bench.module.faults
    faults.refused, faults.untouched, faults.nan = {2}, {2}, {3}
    y, seen = bench.array(bench.y, 2, WIDTH), []
    for _ in range(4):
        y[:] = -1
        done = context.execute_async_v3(bench.streams[0])
        bench.wait()
        seen.append((done, float(y[0, 0])))
    assert seen[:3] == [(True, 2.0), (False, -1.0), (True, -1.0)]  # the third call is the second run
    assert seen[3][0]
    assert np.isnan(seen[3][1])


def test_an_engine_may_be_slow_or_hang_even_when_it_is_replayed(bench: Bench) -> None:
    context = bench.ready()
    assert context.execute_async_v3(bench.streams[0])
    bench.begin()
    assert context.execute_async_v3(bench.streams[0])
    graph = bench.end()
    bench.wait()
    bench.driver.slow["double"] = 2.0
    bench.driver.cuGraphLaunch(graph, bench.streams[0])
    began = bench.driver.clock.now()
    bench.wait()
    assert bench.driver.clock.now() - began >= 2
    bench.driver.slow["double"] = float("inf")
    bench.driver.cuGraphLaunch(graph, bench.streams[0])
    bench.driver.clock.sleep(1e6)
    assert bench.driver.cuStreamQuery(bench.streams[0])[0] == Status.CUDA_ERROR_NOT_READY


def test_the_drivers_faults_reach_tensorrt(bench: Bench) -> None:
    bench.driver.faults.calls["execute_async_v3"] = Status.CUDA_ERROR_LAUNCH_FAILED
    assert bench.ready().execute_async_v3(bench.streams[0]) is False
    assert "CUDA refused" in bench.log[-1]


@pytest.mark.parametrize("seed", range(5))
def test_order_on_a_stream_holds_in_any_interleaving(seed: int) -> None:
    bench = Bench(seed)
    context = bench.ready()
    for _ in range(6):
        assert context.execute_async_v3(bench.streams[0])
    bench.wait()
    assert (bench.array(bench.y, 2, WIDTH) == 7).all()

"""One TensorRT-RTX engine in a process of its own: options, refusals, a death, and the host memory that it may hold."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ostinato.builder.engine_job import EngineJob, check_profiles, step_profiles
from ostinato.builder.engine_process import BASE_BYTES, WEIGHT_COPIES, EngineProcess, resident_bytes
from ostinato.engines.engine_record import EngineProfile, EngineTensor
from ostinato.engines.errors import BuildError
from ostinato.engines.tensorrt_options import TensorRTOptions

from .conftest import LIMITS

MIB = 1 << 20


def job(folder: Path, *, operator: str = "Gemm", width: int = 64, **changes: Any) -> EngineJob:
    """A linear layer, or a node that TensorRT does not know."""
    helper = onnx.helper
    weight = onnx.numpy_helper.from_array(np.full((width, width), 0.5, np.float16), "weight")
    node = helper.make_node(operator, ["x", "weight"], ["y"], name="the_node")
    graph = helper.make_graph(
        [node],
        "segment",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT16, ["T", width])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT16, ["T", width])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    model.ir_version = 11
    (folder / "engines").mkdir(exist_ok=True)
    (folder / "one.onnx").write_bytes(model.SerializeToString())
    x = EngineTensor("x", "float16", ("T", width))
    fields: dict[str, Any] = {
        "name": "one",
        "model": folder / "one.onnx",
        "engine": folder / "engines" / "one.engine",
        "inputs": (x,),
        "outputs": (EngineTensor("y", "float16", ("T", width)),),
        "profiles": step_profiles((x,), LIMITS),
        "options": TensorRTOptions(),
        "compute_capabilities": ("8.9",),
    }
    return EngineJob(**(fields | changes))


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    with EngineProcess() as process:
        yield process


def unheard(phase: str, step: int, steps: int) -> None: ...


def test_a_node_that_does_not_parse_is_named(process: EngineProcess, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"one: .*the_node.*Bernoullish"):
        process.build(job(tmp_path, operator="Bernoullish"), 0, unheard)
    assert process.build(job(tmp_path), 0, unheard).size_bytes > 0  # and the process goes on
    assert (tmp_path / "engines" / "one.engine").exists()


def test_phases_and_their_steps_are_heard(process: EngineProcess, tmp_path: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    process.build(job(tmp_path), 0, lambda *what: heard.append(what))
    assert heard[0][0] == "Building engine"
    assert max(step for phase, step, _ in heard if phase == "Building engine") > 0
    assert all(0 <= step <= steps for _, step, steps in heard if steps)


@pytest.mark.parametrize("options", [TensorRTOptions(version_compatible=True), TensorRTOptions(optimization_level=0)])
def test_options_that_rtx_has_are_taken(process: EngineProcess, options: TensorRTOptions, tmp_path: Path) -> None:
    assert process.build(job(tmp_path, options=options), 0, unheard).size_bytes > 0


def test_an_engine_may_always_be_captured_and_has_every_option_that_is_asked_for() -> None:
    """Flags, as TensorRT-RTX's own configuration gives them back. Without the first an engine allocates as it runs."""
    code = """if True:
        import tensorrt_rtx as trt
        from ostinato.builder.rtx_builder import _configure
        from ostinato.engines.tensorrt_options import TensorRTOptions
        builder = trt.Builder(trt.Logger())
        for options in (TensorRTOptions(), TensorRTOptions(version_compatible=True, optimization_level=2)):
            config = builder.create_builder_config()
            _configure(config, options, ("8.6", "12.0"))
            print(*(name for name, flag in trt.BuilderFlag.__members__.items() if config.get_flag(flag)))
            print(config.builder_optimization_level, *map(config.get_compute_capability, range(2)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    plain, capabilities, asked, level = done.stdout.splitlines()
    assert "REQUIRE_USER_ALLOCATION" in plain.split()
    assert set(asked.split()) - set(plain.split()) == {"VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME"}
    assert "SM86" in capabilities
    assert "SM120" in capabilities
    assert level.startswith("2 ")


def test_an_unknown_gpu_is_refused(process: EngineProcess, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"compute capability 9\.0"):
        process.build(job(tmp_path, compute_capabilities=("9.0",)), 0, unheard)


@pytest.mark.parametrize(
    "shapes", [((1,), (1100,), (1000,)), ((4,), (2,), (8,)), ((0,), (1,), (2,)), ((1, 1), (1,), (1,))]
)
def test_profiles_out_of_order_are_refused(shapes: Any, process: EngineProcess, tmp_path: Path) -> None:
    profile = EngineProfile("prefill", {"x": shapes})
    with pytest.raises(BuildError, match="profile prefill: x"):
        check_profiles([profile])
    with pytest.raises(BuildError, match="profile prefill: x"):
        process.build(job(tmp_path, profiles=(profile,)), 0, unheard)


def test_a_process_that_dies_is_a_refusal(tmp_path: Path) -> None:
    with EngineProcess() as process:
        process.build(job(tmp_path), 0, unheard)

        def kill(*_: Any) -> None:
            os.kill(process.pid, signal.SIGABRT)

        with pytest.raises(BuildError, match=r"one: the TensorRT-RTX process ended with code -6"):
            process.build(job(tmp_path), 0, kill)
        with pytest.raises(BuildError, match="process ended"):
            process.build(job(tmp_path), 0, unheard)


# --- host memory ---------------------------------------------------------------------------------------------------


def test_a_job_that_would_need_too_much_is_refused_before_it_starts(tmp_path: Path) -> None:
    held = resident_bytes(os.getpid())
    weights = 64 * MIB
    need = held + BASE_BYTES + WEIGHT_COPIES * weights
    with EngineProcess(need - 200 * MIB) as process:
        with pytest.raises(BuildError, match=r"one needs about \d+ MiB of host memory.*--max-build-memory"):
            process.build(job(tmp_path), weights, unheard)
        assert not (tmp_path / "engines" / "one.engine").exists()


def test_a_build_that_grows_past_the_bound_is_cancelled(tmp_path: Path) -> None:
    """The prediction, told of no weight, fits; 200 MiB of weights do not."""
    with EngineProcess(resident_bytes(os.getpid()) + BASE_BYTES + MIB) as process:
        wide = job(tmp_path, width=10240)
        with pytest.raises(BuildError, match=r"one: the build holds \d+ MiB of host memory, --max-build-memory"):
            process.build(wide, 0, unheard)
        assert not wide.engine.exists()


def test_predictions_cover_what_a_build_takes(tmp_path: Path) -> None:
    width = 6144
    weights = width * width * 2
    with EngineProcess() as process:
        peak = 0

        def watch(*_: Any) -> None:
            nonlocal peak
            peak = max(peak, resident_bytes(process.pid))

        process.build(job(tmp_path, width=width), weights, watch)
    assert peak <= BASE_BYTES + WEIGHT_COPIES * weights

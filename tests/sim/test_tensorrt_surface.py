"""The simulated TensorRT has what the runtime uses, under the names and with the parameters of both real bindings."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx

from ..tensorrt_standin import real_bindings
from .driver import SimDriver
from .tensorrt import ICudaEngine, IRuntimeConfig, Runtime, SimTensorRT, SimTensorRTRTX
from .tensorrt_context import IExecutionContext

USER = Path(__file__).parent.parent.parent / "runtime" / "trt.py"
CLASSES = (Runtime, ICudaEngine, IExecutionContext, IRuntimeConfig)
OURS = {"module", "runtime", "spec", "input", "has", "error"}  # how the simulated classes know each other
RTX_ONLY = {
    "CudaGraphStrategy", "DynamicShapesKernelSpecializationStrategy", "cuda_graph_strategy",
    "dynamic_shapes_kernel_specialization_strategy", "is_stream_capturable",
}  # fmt: skip
SET_WHEN_MADE = {  # attributes of objects, not of their classes
    "logger", "engine_host_code_allowed", "name", "num_io_tensors", "num_optimization_profiles",
    "device_memory_size_v2", "engine", "active_optimization_profile", "cuda_graph_strategy",
    "dynamic_shapes_kernel_specialization_strategy",
}  # fmt: skip


def bindings(name: str) -> Any:
    return tensorrt_rtx if name == "rtx" else real_bindings()


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def parameters(function: Any) -> list[list[str]]:
    """Of every overload, as the bindings' docstring has them."""
    found = re.findall(rf"{function.__name__}\(self: [\w.]+(.*?)\) ->", function.__doc__)
    return [re.findall(r", (\w+): ", arguments) for arguments in found]


@pytest.mark.parametrize("target", ["rtx", "trt"])
@pytest.mark.parametrize("ours", CLASSES, ids=lambda one: one.__name__)
def test_methods_are_those_of_the_bindings(ours: type, target: str) -> None:
    theirs = getattr(bindings(target), ours.__name__)
    for name in public(ours) - OURS:
        if target == "trt" and name in RTX_ONLY:
            continue
        assert hasattr(theirs, name), name
        if inspect.isfunction(function := getattr(ours, name)):
            _, *mine = inspect.signature(function).parameters
            assert mine in parameters(getattr(theirs, name)), name


@pytest.mark.parametrize("target", ["rtx", "trt"])
def test_what_the_runtime_uses_is_there(target: str) -> None:
    """Every attribute in its file that any of the classes, or the module, has."""
    real = bindings(target)
    theirs = public(real).union(*(public(getattr(real, one.__name__)) for one in CLASSES))
    used = {node.attr for node in ast.walk(ast.parse(USER.read_text())) if isinstance(node, ast.Attribute)} & theirs
    module = (SimTensorRTRTX if target == "rtx" else SimTensorRT)(SimDriver())
    ours = public(module).union(SET_WHEN_MADE, *(public(one) for one in CLASSES))
    assert used <= ours
    assert len(used) >= 15


@pytest.mark.parametrize("target", ["rtx", "trt"])
def test_the_module_has_no_more_than_the_real_one(target: str) -> None:
    kind = SimTensorRTRTX if target == "rtx" else SimTensorRT
    extras = {"driver", "faults", "register", "spec", "allocates", "check_config"}
    assert public(kind) - extras <= public(bindings(target))


def test_attributes_of_objects_are_the_bindings() -> None:
    theirs = set().union(*(public(getattr(tensorrt_rtx, one.__name__)) for one in CLASSES))
    assert theirs >= SET_WHEN_MADE

"""The simulated driver has exactly what the project uses of cuda-python's driver module, as it is there."""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as real

from .driver import SimDriver
from .toy import random_steps, register_kernels, write_files
from .toy_rank import ToyRank

ROOT = Path(__file__).parent.parent.parent
USERS = [path for room in ("runtime", "plugins") for path in sorted((ROOT / room).glob("*.py"))]
CHECKS = ("check", "ask", "device.check", "self.check", "self.device.check")


def _is_name(name: str) -> bool:
    return re.match("cu[A-Z]|CU[a-z]|CU_|CUDA_", name) is not None


def _attributes() -> set[str]:
    """Every function, class and enum member of the driver that is named anywhere."""
    return {
        node.attr
        for path in USERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and _is_name(node.attr)
    }


def _surface() -> set[str]:
    return {name for name in dir(SimDriver) if _is_name(name)}


def test_the_simulated_driver_has_what_is_used_and_no_more() -> None:
    used = {name for name in _attributes() if not name.startswith("CU_")}
    assert used - {"CUDA_ERROR_NOT_READY"} == _surface()
    assert len(used) > 35


@pytest.mark.parametrize("name", sorted(_surface()))
def test_signatures_are_those_of_the_real_module(name: str) -> None:
    theirs, ours = getattr(real, name), getattr(SimDriver, name)
    if name.startswith("CU"):
        assert ours is theirs
        return
    _, *parameters = inspect.signature(ours).parameters
    assert parameters == list(inspect.signature(theirs).parameters)


@pytest.mark.parametrize("name", sorted(name for name in _attributes() if name.startswith("CU_")))
def test_enum_members_are_there(name: str) -> None:
    enums = [getattr(SimDriver, kind) for kind in _surface() if kind.startswith("CU")]
    assert sum(hasattr(enum, name) for enum in enums) == 1


def _direct_calls() -> Iterator[tuple[str, ast.Call, str, list[ast.expr]]]:
    """Every place where a function of the driver is called through a check, and with what."""
    for path in USERS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                for place, argument in enumerate(node.args):
                    if (
                        isinstance(argument, ast.Attribute)
                        and argument.attr.startswith("cu")
                        and _is_name(argument.attr)
                    ):
                        yield path.name, node, argument.attr, node.args[place + 1 :]


def test_calls_have_as_many_arguments_as_the_real_function_takes() -> None:
    counted = 0
    for file, call, name, arguments in _direct_calls():
        if file in ("cuda.py", "capture.py") and ast.unparse(call.func) in CHECKS:
            assert len(arguments) == len(inspect.signature(getattr(real, name)).parameters), name
            counted += 1
    assert counted >= 20


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """The newest arguments of every function, from a whole life of a rank."""
    folder = tmp_path_factory.mktemp("toy")
    write_files(folder)
    driver = SimDriver()
    register_kernels(driver)
    rank = ToyRank(driver, folder)
    rank.run(random_steps(0, 3))
    rank.stream.copy(rank.buffers.address("cut"), rank.buffers.address("input"), 16)
    rank.device.is_sealed = False
    rank.stream.after(rank.device.event())
    rank.close()
    return driver.arguments


def test_a_life_of_a_rank_calls_every_function(arguments: dict[str, tuple[Any, ...]]) -> None:
    uncalled = {name for name in _surface() if name.startswith("cu")} - arguments.keys()
    assert uncalled == {"cuGetErrorString", "cuFuncSetAttribute"}


def test_the_real_module_takes_the_types_that_are_given(arguments: dict[str, tuple[Any, ...]]) -> None:
    """Types are looked at before the library is: where there is none, nothing else may be complained of."""
    if _has_driver():
        pytest.skip("a real driver would follow the addresses")
    for name, values in arguments.items():
        with pytest.raises(RuntimeError) as refused:
            getattr(real, name)(*values)
        assert type(refused.value).__name__ == "DynamicLibNotFoundError", name


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True

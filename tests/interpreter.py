"""Kernels on the CPU: a launch rule's launches, run by Triton's interpreter over NumPy arrays, in place (in tests).

Triton decides when a kernel is decorated whether it will be interpreted or compiled. Here the compiled form's Python
function is interpreted, so one process can do both. The interpreter's bfloat16 is mended on the way: it would cut
float32 off instead of rounding to nearest even as GPUs do, and multiply matrices of bit patterns.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterOptions,
    TensorHandle,
    _get_np_dtype,
    _patch_lang,
    interpreter_builder,
)
from triton.runtime.jit import JITFunction

from ostinato.plugins.kernel_launch import KernelSpec, Launch, Scratch

BF16 = np.dtype(ml_dtypes.bfloat16)


def run_launches(
    launches: Sequence[Launch], tensors: Mapping[str, NDArray[Any]], package: str = "ostinato.plugins"
) -> None:
    """Run each launch in order; kernels read and write the arrays themselves, found by their pointers' names.

    An array's dtype must be the pointer's (bfloat16 is that of ml_dtypes), and it must be contiguous and writeable.
    """
    shared = {pointer.name for launch in launches for pointer in launch.kernel.pointers}
    memory = {name: _as_torch(tensors[name]) for name in shared}
    for launch in launches:
        for pointer in launch.kernel.pointers:
            found = tensors[pointer.name].dtype.name
            assert found == pointer.dtype, f"{pointer.name} is {found}, the kernel wants {pointer.dtype}"
        kernel = InterpretedFunction(compiled_form(launch.kernel, package).fn)
        arguments = [memory[pointer.name] for pointer in launch.kernel.pointers]
        with _interpreted_calls(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # as on a GPU, inf and NaN raise nothing
            kernel[launch.grid](*arguments, **dict(launch.kernel.constants))


def scratch_arrays(scratch: Sequence[Scratch]) -> dict[str, NDArray[Any]]:
    """Scratch as a kernel may find it: floats NaN, integers wild; every size must be a number."""
    arrays: dict[str, NDArray[Any]] = {}
    for part in scratch:
        size = [dim for dim in part.shape if isinstance(dim, int)]
        assert len(size) == len(part.shape), f"{part.name} has an open size: {part.shape}"
        dtype = BF16 if part.dtype == "bfloat16" else np.dtype(part.dtype)
        arrays[part.name] = np.full(np.prod(size) * dtype.itemsize, 0xFF, np.uint8).view(dtype).reshape(size)
    return arrays


def compiled_form(spec: KernelSpec, package: str = "ostinato.plugins") -> Any:
    """The kernel as Triton's compiler takes it: parameters are the spec's pointers, in order, then its constants."""
    function = getattr(importlib.import_module(f"{package}.{spec.module}"), spec.function)
    pointers, constants = [pointer.name for pointer in spec.pointers], {name for name, _ in spec.constants}
    assert function.arg_names[: len(pointers)] == pointers, f"{spec.function} takes {function.arg_names}"
    assert set(function.arg_names[len(pointers) :]) == constants, f"{spec.function} takes {function.arg_names}"
    return function


def _as_torch(array: NDArray[Any]) -> torch.Tensor:
    assert array.flags.c_contiguous, "a device tensor is contiguous"
    assert array.flags.writeable, "the interpreter writes every argument back"
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@cache
def _rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    interpreted: Callable[..., Any] = InterpretedFunction(function).rewrite()
    return interpreted


@contextmanager
def _interpreted_calls() -> Iterator[None]:
    """While it lasts, kernel functions that call each other (and Triton's own, such as tl.sum) are interpreted."""

    def call(function: JITFunction[Any], *arguments: Any, **keywords: Any) -> Any:
        return _rewritten(function.fn)(*arguments, **keywords)

    compiled_call = JITFunction.__call__
    language = _patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    JITFunction.__call__ = call
    checking, interpreter_builder.options = interpreter_builder.options, InterpreterOptions(sanitize_overflow=False)
    interpreter_builder.cast_impl = _cast
    interpreter_builder.create_dot = _dot
    try:
        yield
    finally:
        del interpreter_builder.cast_impl, interpreter_builder.create_dot
        interpreter_builder.options = checking
        JITFunction.__call__ = compiled_call
        language.restore()


def _cast(source: TensorHandle, target_type: Any) -> TensorHandle:
    target = target_type.scalar
    if target == tl.bfloat16:
        return TensorHandle(_numbers(source).astype(BF16).view(np.uint16), target)
    return TensorHandle(_numbers(source).astype(_get_np_dtype(target)), target)


def _dot(a: TensorHandle, b: TensorHandle, total: TensorHandle, *_precision: Any) -> TensorHandle:
    left, right = _numbers(a), _numbers(b)
    return TensorHandle(np.matmul(left, right, dtype=total.data.dtype) + total.data, total.dtype.scalar)


def _numbers(handle: TensorHandle) -> NDArray[Any]:
    """The handle's values; the interpreter keeps bfloat16 as bit patterns."""
    data: NDArray[Any] = handle.data
    return data.view(BF16).astype(np.float32) if handle.dtype.scalar == tl.bfloat16 else data

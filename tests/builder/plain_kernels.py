"""Small kernels that the compiler's tests compile: one sound, and one for each thing that is refused."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_and_add(x, y, out, size: tl.constexpr, factor: tl.constexpr):
    """out = x * factor + y, size numbers a program."""
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(out + at, tl.load(x + at).to(tl.float32) * factor + tl.load(y + at).to(tl.float32))


@triton.jit
def centre(x, size: tl.constexpr):
    """x - sum(x) in place: all size numbers live in registers at once."""
    at = tl.arange(0, size)
    value = tl.load(x + at)
    tl.store(x + at, value - tl.sum(value))


@triton.jit
def matrix_product(x, y, out, size: tl.constexpr):
    """out = x @ y, size x size; both stand in shared memory whole."""
    at = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at), input_precision="tf32"))


@triton.jit
def misspelt(x, size: tl.constexpr):
    """Does not compile: there is no such name."""
    tl.store(x + tl.arange(0, size), tl.no_such_function(x))

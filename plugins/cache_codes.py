"""Numbers of a quantized KV cache: what kernels call to make codes and read them, and the NumPy oracle (per step).

    a token's head  x[D]  ─▶  scale = max|x| / TOP, in float32   codes = round(x / scale), one byte each

"int8": two's complement, TOP 127. "float8_e4m3": the OCP 8-bit format with 4 exponent bits, no infinity, TOP 448
(OCP 8-bit Floating Point Specification 1.0). Its conversion is done on bits, since GPUs before sm_89 lack the
instructions. Halves round to even. A head of zeros has scale 0 and codes 0. A head that holds NaN has scale NaN.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from ostinato.engines.io_table import SCALE_BYTES

INT8_TOP = tl.constexpr(127.0)
FLOAT8_TOP = tl.constexpr(448.0)
FLOAT8_UNIT = tl.constexpr(256.0)  # float8's bits, read as a float16's upper bits, are 1/256 of the number
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it to a float32 leaves no fraction bits, rounded to even


@triton.jit
def to_codes(x, cache_dtype: tl.constexpr):
    """Float32 [heads, D] → codes uint8 [heads, D] and scales float32 [heads]; what is outside a head must be 0."""
    top: tl.constexpr = INT8_TOP if cache_dtype == "int8" else FLOAT8_TOP
    scale = tl.div_rn(tl.max(tl.abs(x), 1), tl.full([x.shape[0]], top, tl.float32))
    scale = tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), scale)  # a GPU's max passes over NaN
    divisor = tl.where(scale > 0, scale, 1.0)
    unit = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    unit = tl.minimum(tl.maximum(unit, -top), top)  # a subnormal scale is coarse: the quotient may lie past the top
    if cache_dtype == "int8":
        codes = ((unit + ROUNDER) - ROUNDER).to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        codes = to_float8(unit)
    return codes, scale


@triton.jit
def to_float8(x):
    """Float32 within ±448 → the bits of float8 e4m3, uint8."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Three fraction bits stay: add just under half of the last one, and its own bit so that a tie goes to even.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 steps are 2^-9, the spacing of float32 at 2^14: one addition rounds.
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size >= 0x3C800000, normal, subnormal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_codes(codes, cache_dtype: tl.constexpr, dtype: tl.constexpr):
    """Codes → numbers of `dtype`, exact; float8's come out divided by FLOAT8_UNIT, which `from_scales` gives back."""
    if cache_dtype == "int8":
        numbers = codes.to(tl.int8, bitcast=True)
    else:
        wide = codes.to(tl.uint16)
        numbers = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return numbers.to(dtype)


@triton.jit
def from_scales(scales, cache_dtype: tl.constexpr):
    """Scales as stored → what a number out of `from_codes` is multiplied by."""
    if cache_dtype != "int8":
        scales *= FLOAT8_UNIT
    return scales


@triton.jit
def scale_pointers(cache, byte):
    """Where float32 scales stand in a cache of bytes."""
    return (cache + byte).to(tl.pointer_type(tl.float32))


def quantize(x: NDArray[Any], cache_dtype: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Oracle of `to_codes`: finite numbers [..., D] → codes [..., D] and scales [...]."""
    top = np.float32(127 if cache_dtype == "int8" else 448)
    x = x.astype(np.float32)
    scales = (np.abs(x).max(axis=-1) / top).astype(np.float32)
    unit = np.clip(x / np.where(scales > 0, scales, np.float32(1))[..., None], -top, top)
    codes = np.rint(unit).astype(np.int8) if cache_dtype == "int8" else unit.astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8), scales


def dequantize(codes: NDArray[np.uint8], scales: NDArray[np.float32], cache_dtype: str) -> NDArray[np.float32]:
    """Codes [..., D] and scales [...] → the numbers that attention reads."""
    kind = np.dtype(np.int8) if cache_dtype == "int8" else np.dtype(ml_dtypes.float8_e4m3fn)
    return codes.view(kind).astype(np.float32) * scales[..., None]


def split_cache(cache: NDArray[np.uint8], block_size: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Views of a cache of bytes [N, Hkv, block*(D+4)]: codes [N, Hkv, block, D] and scales [N, Hkv, block]."""
    blocks, heads, size = cache.shape
    head_size = size // block_size - SCALE_BYTES
    codes = cache[..., : block_size * head_size].reshape(blocks, heads, block_size, head_size)
    return codes, cache[..., block_size * head_size :].view(np.float32)

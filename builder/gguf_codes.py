"""GGUF's block formats that are group codes already: taken apart without a rounding (offline).

Q4_0  d, 16 bytes      d * (q - 8)     the low nibbles are the first 16 numbers, the high ones the last
Q4_1  d, m, 16 bytes   d * q + m
Q8_0  d, 32 bytes      d * q           two's complement
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from gguf import ReaderTensor

from ostinato.engines.decoder_record import GROUP
from ostinato.plugins.x86_pack import F16, U8, ZERO_CODE, Groups

# What a matrix of each format comes out in.
PUBLISHED_BITS: Mapping[str, int] = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_HALF = 2  # bytes of a float16


def published_codes(tensor: ReaderTensor) -> Groups | None:
    """The codes [N, K] of a matrix in such a format; None of any other."""
    split = _FORMATS.get(tensor.tensor_type.name)
    if split is None:
        return None
    num_outputs, num_inputs = (int(size) for size in reversed(tensor.shape))
    blocks = np.ascontiguousarray(tensor.data).reshape(num_outputs, num_inputs // GROUP, -1).view(np.uint8)
    return split(blocks)


def _q4_0(blocks: U8) -> Groups:
    scales = _halves(blocks, 0)
    with np.errstate(over="ignore"):
        minima = scales * np.float16(-8)  # exact, unless it is beyond float16
    return Groups(_nibbles(blocks[..., _HALF:]), scales, minima)


def _q4_1(blocks: U8) -> Groups:
    return Groups(_nibbles(blocks[..., 2 * _HALF :]), _halves(blocks, 0), _halves(blocks, 1))


def _q8_0(blocks: U8) -> Groups:
    codes: U8 = blocks[..., _HALF:] ^ np.uint8(ZERO_CODE)  # two's complement plus 128
    return Groups(codes.reshape(len(blocks), -1), _halves(blocks, 0), None)


def _halves(blocks: U8, place: int) -> F16:
    """[N, K/32]"""
    taken = np.ascontiguousarray(blocks[..., place * _HALF : (place + 1) * _HALF])
    return taken.view(np.float16)[..., 0]


def _nibbles(packed: U8) -> U8:
    """[N, K/32, 16] bytes → [N, K]."""
    codes: U8 = np.concatenate([packed & 0x0F, packed >> 4], axis=-1).reshape(len(packed), -1)
    return codes


_FORMATS: Mapping[str, Callable[[U8], Groups]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}

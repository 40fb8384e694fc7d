"""GGUF's formats of 4-bit codes with a step: taken apart without a rounding (offline).

Q4_0  d, 16 bytes      d * (q - 8)     the low nibbles are the first 16 numbers, the high ones the last
Q4_1  d, m, 16 bytes   d * q + m
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from gguf import ReaderTensor

from ostinato.plugins.x86_pack import F32, SHARE, U8

from .group_codes import StepCodes

_HALF = 2  # bytes of a float16


def published_codes(tensor: ReaderTensor) -> StepCodes | None:
    """The codes [N, K] of a matrix in such a format; None of any other."""
    split = _FORMATS.get(tensor.tensor_type.name)
    if split is None:
        return None
    num_outputs, num_inputs = (int(size) for size in reversed(tensor.shape))
    blocks = np.ascontiguousarray(tensor.data).reshape(num_outputs, num_inputs // SHARE, -1).view(np.uint8)
    return split(blocks)


def _q4_0(blocks: U8) -> StepCodes:
    steps = _halves(blocks, 0)
    return StepCodes(_nibbles(blocks[..., _HALF:]), steps, steps * np.float32(-8))


def _q4_1(blocks: U8) -> StepCodes:
    return StepCodes(_nibbles(blocks[..., 2 * _HALF :]), _halves(blocks, 0), _halves(blocks, 1))


def _halves(blocks: U8, place: int) -> F32:
    """Float16 [N, K/32] as float32."""
    taken = np.ascontiguousarray(blocks[..., place * _HALF : (place + 1) * _HALF])
    return taken.view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """[N, K/32, 16] bytes → [N, K]."""
    codes: U8 = np.concatenate([packed & 0x0F, packed >> 4], axis=-1).reshape(len(packed), -1)
    return codes


_FORMATS: Mapping[str, Callable[[U8], StepCodes]] = {"Q4_0": _q4_0, "Q4_1": _q4_1}
PUBLISHED = frozenset(_FORMATS)  # formats whose codes are kept

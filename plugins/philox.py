"""The source of every row's uniform: Philox4x32-10, a random number as a function of its counter (per step).

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (2011). Nothing is kept between calls, so
a request draws the same numbers alone, in any batch and after a preemption.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .sampling_rows import F32

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_UNIFORM_BITS = 24  # an f32 holds every multiple of 2^-24 below 1


def philox4x32(counter: U32, key: U32) -> U32:
    """Ten rounds on each line: counter [n, 4], key [n, 2] → [n, 4]."""
    a, b, c, d = (counter[:, i].astype(np.uint64) for i in range(4))
    key_0, key_1 = key[:, 0].copy(), key[:, 1].copy()
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (right >> _HALF) ^ b ^ key_0, right & _LOW, (left >> _HALF) ^ d ^ key_1, left & _LOW
        key_0 += _KEY_STEPS[0]
        key_1 += _KEY_STEPS[1]
    return np.stack([a, b, c, d], axis=1).astype(np.uint32)


def uniforms(seeds: U64, choices: U32, indices: U32) -> F32:
    """One uniform a row, a multiple of 2^-24 in [0, 1). All inputs and the output are [S].

    `seeds` key the generator; `choices` (which of a call's n answers) and `indices` (of the output token) count.
    """
    key = np.stack([seeds & _LOW, seeds >> _HALF], axis=1).astype(np.uint32)
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 0] = indices
    counter[:, 1] = choices
    words = philox4x32(counter, key)[:, 0] >> np.uint32(32 - _UNIFORM_BITS)
    return words.astype(np.float32) * np.float32(2.0**-_UNIFORM_BITS)

"""Weights as small codes with scales: what target `x86` multiplies (offline).

    plain numbers ─┬─────────────────────────────────▶ Bytes     a scale for up to 256 inputs, the largest is 127
                   └▶ StepCodes, 4 bits (or published) ─▶ Nibbles   the same, and how nibbles become its bytes

A nibble's step and minimum are kept in 256ths of the byte's step, so what they are rounded by is little beside that the
byte is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ostinato.plugins.x86_pack import F32, SHARE, U8, ZERO_CODE, Bytes, Nibbles, group_of, num_groups

_TOP_BYTE, _TOP_NIBBLE = 127, 15
_PARTS = 256  # of a byte's step, in which nibbles' steps are counted
_ROWS = 1024  # of a matrix at a time, in float64
_LEAST = np.finfo(np.float32).tiny  # a smaller scale would hold fewer digits: such weights are nothing


@dataclass(frozen=True)
class StepCodes:
    """4-bit codes as they are published: weight[n, k] = steps[n, k // 32] * codes[n, k] + minima[n, k // 32]."""

    codes: U8  # [N, K], below 16
    steps: F32  # [N, K/32]
    minima: F32  # [N, K/32]


_Rows = TypeVar("_Rows", bound=Bytes | Nibbles | StepCodes)  # arrays that all have a matrix's rows


def byte_codes(weight: F32) -> Bytes:
    """The nearest bytes of a finite weight [N, K]."""
    shares = weight.reshape(len(weight), -1, SHARE)
    scales = _scales(np.abs(shares).max(axis=2))
    codes = np.rint(shares / _divisors(scales, weight.shape[1])[..., None]) + ZERO_CODE
    return Bytes(codes.astype(np.uint8).reshape(weight.shape), scales)


def step_codes(weight: F32) -> StepCodes:
    """The nearest 4-bit codes of a finite weight [N, K], between the least and the largest of 32 inputs."""
    return stacked(_step_codes(weight[begin : begin + _ROWS]) for begin in range(0, len(weight), _ROWS))


def _step_codes(weight: F32) -> StepCodes:
    shares = weight.reshape(len(weight), -1, SHARE).astype(np.float64)  # in which no difference is too large
    minima = shares.min(axis=2)
    steps = ((shares.max(axis=2) - minima) / _TOP_NIBBLE).astype(np.float32)
    above = (shares - minima[..., None]) / np.where(steps == 0, np.inf, steps)[..., None]
    codes = np.clip(np.rint(above), 0, _TOP_NIBBLE).astype(np.uint8)  # a tiny step has lost digits
    return StepCodes(codes.reshape(weight.shape), steps, minima.astype(np.float32))


def nibbles_of(of: StepCodes) -> Nibbles:
    """The same codes, with what makes the nearest bytes of them. Steps and minima must be finite."""
    rows, columns = of.codes.shape
    shares = of.codes.reshape(rows, -1, SHARE)
    lowest, highest = shares.min(axis=2), shares.max(axis=2)
    steps, minima = of.steps.astype(np.float64), of.minima.astype(np.float64)
    ends = steps * lowest + minima, steps * highest + minima
    scales = _scales(np.maximum(*np.abs(ends)))
    parts = _PARTS / _divisors(scales, columns).astype(np.float64)
    is_one = lowest == highest  # then the step says nothing, and may be of any size
    factors = np.rint(np.where(is_one, 0, steps) * parts)
    offsets = np.rint(np.where(is_one, ends[0], minima) * parts) + ZERO_CODE * _PARTS + _PARTS // 2
    return Nibbles(of.codes, _lowest_bits(factors).view(np.int16), _lowest_bits(offsets), scales)


def stacked(parts: Iterable[_Rows]) -> _Rows:
    """Matrices of the same kind and inputs, one below the other."""
    whole = tuple(parts)
    kind = type(whole[0])
    arrays: list[Any] = [np.concatenate([getattr(part, field.name) for part in whole]) for field in fields(kind)]
    return kind(*arrays)


def with_rows(matrix: _Rows, change: Callable[[NDArray[Any]], NDArray[Any]]) -> _Rows:
    """The same with the rows of every array changed alike."""
    arrays: list[Any] = [change(getattr(matrix, field.name)) for field in fields(type(matrix))]
    return type(matrix)(*arrays)


def _scales(largest: NDArray[Any]) -> F32:
    """[N, groups] of the largest sizes [N, K/32]."""
    rows, shares = largest.shape
    groups = num_groups(shares * SHARE)
    filled = np.pad(largest, ((0, 0), (0, groups * group_of(shares * SHARE) // SHARE - shares)))
    scales = (filled.reshape(rows, groups, -1).max(axis=2) / _TOP_BYTE).astype(np.float32)
    return np.where(scales < _LEAST, np.float32(0), scales)


def _divisors(scales: F32, columns: int) -> F32:
    """[N, K/32]; of a scale of 0 infinity, by which all is nothing."""
    sound = np.where(scales == 0, np.float32(np.inf), scales)
    return np.repeat(sound, group_of(columns) // SHARE, axis=1)[:, : columns // SHARE]


def _lowest_bits(numbers: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Sixteen of whole numbers: the sum of what they make is of so many too, so none is missed."""
    return (numbers.astype(np.int64) & 0xFFFF).astype(np.uint16)

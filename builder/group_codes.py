"""Weights as small codes with a float16 scale, and of 4 bits a minimum, for 32 inputs: what `x86` multiplies (offline).

The scale is rounded first and codes are made for the rounded one, so that its rounding costs no more than codes do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.decoder_record import GROUP
from ostinato.plugins.x86_pack import F16, F32, ZERO_CODE, Groups

_TOP_INT8, _TOP_UINT4 = 127, 15


def codes_of(weight: F32, bits: int) -> Groups:
    """The nearest codes of a finite weight [N, K]; check `is_finite` of what comes out."""
    groups = weight.reshape(len(weight), -1, GROUP)
    with np.errstate(over="ignore", invalid="ignore"):
        return _int8(groups) if bits == 8 else _uint4(groups)


def is_finite(matrix: Groups) -> bool:
    """False where float16 can't hold a scale or a minimum, or the published ones are no numbers."""
    minima = matrix.scales if matrix.minima is None else matrix.minima
    return bool(np.isfinite(matrix.scales).all() and np.isfinite(minima).all())


def stacked(parts: Iterable[Groups]) -> Groups:
    """Matrices of the same bits and inputs, one below the other."""
    codes, scales, minima = zip(*((part.codes, part.scales, part.minima) for part in parts), strict=True)
    known = [one for one in minima if one is not None]
    assert len(known) in (0, len(minima)), "matrices of 4 and of 8 bits"
    return Groups(np.concatenate(codes), np.concatenate(scales), np.concatenate(known) if known else None)


def with_rows(matrix: Groups, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Groups:
    """The same with the rows of every array changed alike."""
    return Groups(change(matrix.codes), change(matrix.scales), None if matrix.minima is None else change(matrix.minima))


def _int8(groups: F32) -> Groups:
    scales = _scales_for(np.abs(groups).max(axis=2), _TOP_INT8)
    codes = np.clip(np.rint(groups / _divisors(scales)), -_TOP_INT8, _TOP_INT8) + ZERO_CODE
    return Groups(codes.astype(np.uint8).reshape(len(groups), -1), scales, None)


def _uint4(groups: F32) -> Groups:
    minima = groups.min(axis=2).astype(np.float16)
    above = groups - minima.astype(np.float32)[..., None]
    scales = _scales_for(above.max(axis=2), _TOP_UINT4)
    codes = np.clip(np.rint(above / _divisors(scales)), 0, _TOP_UINT4)
    return Groups(codes.astype(np.uint8).reshape(len(groups), -1), scales, minima)


def _scales_for(span: F32, top: int) -> F16:
    """The float16 nearest to span / top; the next one where codes could then not reach the span by half a step.

    That happens among subnormal numbers, whose steps are coarse.
    """
    span = np.maximum(span, 0)
    scales = (span / np.float32(top)).astype(np.float16)
    is_short = scales.astype(np.float32) * np.float32(top + 0.5) < span
    higher: F16 = np.nextafter(scales, np.float16(np.inf))
    return np.where(is_short, higher, scales)


def _divisors(scales: F16) -> F32:
    """[..., 1]; 1 for a group of equal numbers, whose scale is 0."""
    wide: F32 = np.where(scales == 0, np.float16(1), scales).astype(np.float32)[..., None]
    return wide

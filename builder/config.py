"""What a decoder computes, as one flat description that any checkpoint format fills; made offline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ostinato.engines.sizes import ModelSizes


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first and second half of a head.

    `kind` "default", "linear" (angles divided by `factor`) or "llama3" (low frequencies divided by `factor`,
    a smooth band between). `divisors`: one a frequency, for files that publish the scaling as numbers; else empty.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class DecoderConfig:
    """A pre-norm decoder with RMSNorm, rotary grouped-query attention and a gated SiLU MLP."""

    sizes: ModelSizes
    rms_eps: float
    rope: Rope
    tied: bool  # the head reuses the embedding
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def llama3_divisor(wavelength: float, rope: Rope) -> float:
    """How much a frequency is slowed, by its wavelength in tokens."""
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    if wavelength < high:
        return 1.0
    if wavelength > low:
        return rope.factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return 1.0 / ((1 - smooth) / rope.factor + smooth)


def frequency_divisors(rope: Rope, head_size: int) -> list[float]:
    """One divisor a frequency, head_size // 2 of them."""
    if rope.divisors:
        return list(rope.divisors)
    if rope.kind == "linear":
        return [rope.factor] * (head_size // 2)
    if rope.kind == "llama3":
        wavelengths = [2 * math.pi * rope.theta ** (i / head_size) for i in range(0, head_size, 2)]
        return [llama3_divisor(wavelength, rope) for wavelength in wavelengths]
    return [1.0] * (head_size // 2)

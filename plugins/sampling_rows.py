"""The arguments of one FusedSampling call: one line per sampled row (made per step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Per-row sampling arguments; S rows, vocabulary V, W = ⌈V/32⌉, M bias entries.

    Neutral values: temperature 0 is argmax (lowest id wins), top_k <= 0 or >= V off, top_p 1 off, min_p 0 off,
    repetition 1, presence 0, frequency 0. `counts` hold one entry a row, None where the row has no penalty.
    """

    uniforms: F32  # [S] in [0, 1)
    temperature: F32  # [S]
    top_k: I32  # [S]
    top_p: F32  # [S]
    min_p: F32  # [S]
    repetition: F32  # [S]
    presence: F32  # [S]
    frequency: F32  # [S]
    allowed: I32 | None  # [S, W] bitmask, bit v%32 of word v//32; None allows all
    bias_ids: I32  # [S, M], -1 pads
    bias_values: F32  # [S, M]
    prompt_counts: Sequence[I32 | None]  # S × [V]
    output_counts: Sequence[I32 | None]  # S × [V]
    num_logprobs: I32  # [S]: -1 none, 0 the chosen token's, k the chosen token's and the k best


@dataclass(frozen=True, slots=True)
class Sampled:
    """What FusedSampling returns; K = the largest `num_logprobs`, at least 0."""

    tokens: I32  # [S]; -1 where no token is legal
    logprobs: F32  # [S] natural log; NaN in a row that asked for none
    top_ids: I32  # [S, K]
    top_logprobs: F32  # [S, K], descending; NaN past a row's own k

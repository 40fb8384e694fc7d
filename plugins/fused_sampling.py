"""FusedSampling: its schema and its NumPy oracle, the plainest reading of what it computes (offline, and in tests).

    logits ─ bias ─ repetition ─ presence, frequency ─┬─ log-softmax = the reported logprobs
                                                      └─ mask ─ temperature ─ top-k ─ top-p ─ min-p ─ draw

Bias and penalties are f32 operations in exactly that order, so every realisation ranks the same f32 numbers. Ranks
are strict: logit descending, then id ascending. top-k keeps exactly k; top-p the shortest run of ranks whose mass,
of what top-k kept, reaches p, and at least one; min-p those with at least min_p of the best one's probability. The
draw takes the first id, in vocabulary order, whose cumulative mass exceeds the uniform's share of the kept mass.
A row is in error when its greatest logit is not finite (a NaN, +inf, or nothing but -inf) or when its mask leaves
nothing: token -1, and for the logprobs it asked for ids -1 and logprobs -inf.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.io_table import OUTPUTS, SAMPLING_INPUTS

from .operator_schema import OperatorSchema
from .sampling_rows import F32, I32, Sampled, SamplingRows

GREEDY_BELOW = 1e-5  # a temperature under this is argmax
NO_TOKEN = -1
WORD_BITS = 32  # of the `allowed` mask

F64 = NDArray[np.float64]
Flags = NDArray[np.bool_]

FUSED_SAMPLING = OperatorSchema(
    name="FusedSampling",
    inputs=("logits", *(tensor.name for tensor in SAMPLING_INPUTS)),
    outputs=tuple(tensor.name for tensor in OUTPUTS),
)


def fused_sampling(logits: F32, rows: SamplingRows) -> Sampled:
    """Sample every row of `logits` [S, V], float64 from the log-softmax on."""
    count, vocab_size = logits.shape
    width = max(0, int(rows.num_logprobs.max(initial=0)))
    sampled = Sampled(
        tokens=np.full(count, NO_TOKEN, np.int32),
        logprobs=np.full(count, np.nan, np.float32),
        top_ids=np.full((count, width), NO_TOKEN, np.int32),
        top_logprobs=np.full((count, width), np.nan, np.float32),
    )
    for row in range(count):
        adjusted = adjusted_logits(logits[row], rows, row)
        allowed = (
            allowed_tokens(rows.allowed[row], vocab_size) if rows.allowed is not None else np.full(vocab_size, True)
        )
        k = min(int(rows.num_logprobs[row]), vocab_size)
        legal = np.isfinite(adjusted.max()) and bool(np.any(allowed & (adjusted > -np.inf)))
        if legal:
            cumulative = np.cumsum(kept_probabilities(adjusted, allowed, rows, row))
            sampled.tokens[row] = np.argmax(cumulative > np.float64(rows.uniforms[row]) * cumulative[-1])
        if k >= 0:
            logprobs = log_softmax(adjusted) if legal else np.full(vocab_size, -np.inf)
            best = strict_order(adjusted)[:k] if legal else np.full(k, NO_TOKEN)
            sampled.logprobs[row] = logprobs[sampled.tokens[row]]
            sampled.top_ids[row, :k] = best
            sampled.top_logprobs[row, :k] = logprobs[best]
    return sampled


def adjusted_logits(logits: F32, rows: SamplingRows, row: int) -> F32:
    """Logits [V] after bias and penalties, every step rounded to f32."""
    adjusted: F32 = logits.astype(np.float32)
    for token, value in zip(rows.bias_ids[row], rows.bias_values[row], strict=True):
        if token >= 0:
            adjusted[token] += value
    nothing = np.zeros(len(logits), np.int32)
    in_prompt, in_output = rows.prompt_counts[row], rows.output_counts[row]
    in_output = nothing if in_output is None else in_output
    seen = (nothing if in_prompt is None else in_prompt) + in_output > 0
    repetition = rows.repetition[row]
    adjusted = np.where(seen, np.where(adjusted > 0, adjusted / repetition, adjusted * repetition), adjusted)
    adjusted -= rows.presence[row] * (in_output > 0).astype(np.float32)
    adjusted -= rows.frequency[row] * in_output.astype(np.float32)
    return adjusted


def allowed_tokens(words: I32, vocab_size: int) -> Flags:
    """A mask's words [W] as flags [V]: token v is bit v % 32 of word v // 32."""
    token = np.arange(vocab_size)
    bits = words.astype(np.int64)[token // WORD_BITS] >> (token % WORD_BITS)
    return (bits & 1).astype(np.bool_)


def kept_probabilities(adjusted: F32, allowed: Flags, rows: SamplingRows, row: int) -> F64:
    """The probabilities [V] that a legal row draws from: 0 where a mask or a truncation drops the token."""
    ranked = strict_order(np.where(allowed, adjusted, np.float32(-np.inf)))
    logits = np.where(allowed, adjusted.astype(np.float64), -np.inf)[ranked]
    temperature = float(rows.temperature[row])
    greedy = rows.temperature[row] < np.float32(GREEDY_BELOW)
    weights = np.exp((logits - logits[0]) / (1.0 if greedy else temperature))

    top_k = 1 if greedy else int(rows.top_k[row])
    if 0 < top_k < len(weights):
        weights[top_k:] = 0.0
    top_p = float(rows.top_p[row])
    mass_before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    past_top_p = (mass_before >= top_p * weights.sum()) & (top_p < 1.0)
    past_top_p[0] = False
    below_min_p = weights < float(rows.min_p[row])  # the best token's weight is 1
    weights[past_top_p | below_min_p] = 0.0

    probabilities = np.zeros(len(weights))
    probabilities[ranked] = weights / weights.sum()
    return probabilities


def strict_order(values: F32) -> NDArray[np.int64]:
    """Ids [V] by value descending, then id ascending."""
    return np.argsort(-values, kind="stable")


def log_softmax(adjusted: F32) -> F64:
    """Natural-log probabilities [V] in float64."""
    shifted = adjusted.astype(np.float64) - np.float64(adjusted.max())
    shifted -= np.log(np.exp(shifted).sum())
    return shifted

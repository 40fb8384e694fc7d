"""PagedAttention: its schema and its NumPy oracle, the plainest reading of what it computes (offline, and in tests).

    a row's tokens   [0 ─ context_len) cached before   [context_len ─ context_len + new) in this step
    its query i      sees keys j with  i - sliding_window < j <= i   (j from 0 when there is no window)
    key j's slot     block_tables[row, j // block] * block + j % block

Block 0 is the null block: padding reads and writes go there and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .operator_schema import Attribute, OperatorSchema
from .sampling_rows import I32

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class AttentionAttributes:
    """Attributes of a PagedAttention node, by their ONNX names.

    `scale` multiplies q·k. `sliding_window`: keys that a query sees, its own included; 0 = all before it.
    `logit_softcap`: c turns a scaled score s into c * tanh(s / c) before the mask; 0 = none.
    Query head h reads KV head h // (num_q_heads // num_kv_heads).
    """

    num_q_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int = 0
    logit_softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """T tokens in the step, B rows, N blocks, P table width; names and order are those of the node."""

    q: Floats  # [T, Hq*D]
    k: Floats  # [T, Hkv*D]
    v: Floats  # [T, Hkv*D]
    key_cache: Floats  # [N, Hkv, block, D]
    value_cache: Floats  # [N, Hkv, block, D]
    slot_mapping: I32  # [T]
    query_starts: I32  # [B+1]
    context_lens: I32  # [B] tokens cached before this step
    block_tables: I32  # [B, P]


@dataclass(frozen=True, slots=True)
class AttentionOutputs:
    """New caches stand for the old ones changed in place; a target aliases them where it can."""

    out: Floats  # [T, Hq*D]; 0 for a token that no row owns
    key_cache_out: Floats  # [N, Hkv, block, D]
    value_cache_out: Floats  # [N, Hkv, block, D]


PAGED_ATTENTION = OperatorSchema(
    name="PagedAttention",
    inputs=tuple(field.name for field in fields(AttentionInputs)),
    outputs=tuple(field.name for field in fields(AttentionOutputs)),
    attributes=(
        Attribute("num_q_heads", int),
        Attribute("num_kv_heads", int),
        Attribute("head_size", int),
        Attribute("scale", float),
        Attribute("sliding_window", int, 0),
        Attribute("logit_softcap", float, 0.0),
    ),
)


def paged_attention(inputs: AttentionInputs, attributes: AttentionAttributes) -> AttentionOutputs:
    """Write k and v to their slots, then attend, one token at a time; float64 inside, `q`'s dtype outside."""
    a = attributes
    tokens = inputs.q.shape[0]
    keys, values = inputs.key_cache.copy(), inputs.value_cache.copy()
    block = keys.shape[2]
    for token, slot in enumerate(inputs.slot_mapping):
        keys[slot // block, :, slot % block] = inputs.k[token].reshape(a.num_kv_heads, a.head_size)
        values[slot // block, :, slot % block] = inputs.v[token].reshape(a.num_kv_heads, a.head_size)

    out = np.zeros((tokens, a.num_q_heads, a.head_size))
    for row, context_len in enumerate(inputs.context_lens):
        start, end = inputs.query_starts[row : row + 2]
        table = inputs.block_tables[row]
        for token in range(start, end):
            at = int(context_len) + token - start
            first = max(0, at - a.sliding_window + 1) if a.sliding_window else 0
            seen = np.arange(first, at + 1)
            k = keys[table[seen // block], :, seen % block].astype(np.float64)  # [seen, Hkv, D]
            v = values[table[seen // block], :, seen % block].astype(np.float64)
            out[token] = _attend(inputs.q[token].astype(np.float64), k, v, a)
    return AttentionOutputs(out.reshape(tokens, -1).astype(inputs.q.dtype), keys, values)


def _attend(
    q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64], a: AttentionAttributes
) -> NDArray[np.float64]:
    """One token's output, [Hq, D], from the keys and values that it sees, [seen, Hkv, D]."""
    heads = q.reshape(a.num_q_heads, a.head_size)
    group = a.num_q_heads // a.num_kv_heads
    out = np.empty_like(heads)
    for head, query in enumerate(heads):
        scores = k[:, head // group] @ query * a.scale
        if a.logit_softcap:
            scores = a.logit_softcap * np.tanh(scores / a.logit_softcap)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[:, head // group] / weights.sum()
    return out

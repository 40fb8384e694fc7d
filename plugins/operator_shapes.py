"""The sizes that an operator's kernels are compiled for (offline)."""

from __future__ import annotations

from dataclasses import dataclass

from .paged_attention import AttentionAttributes


@dataclass(frozen=True)
class AttentionShape:
    """One rank's attention. `dtype`: of q, k, v and out ("float32", "float16" or "bfloat16").

    `cache_dtype`: the same, or "int8" or "float8_e4m3". `table_width`: P. `max_rows`: B of a prefill step.
    """

    attributes: AttentionAttributes
    dtype: str
    cache_dtype: str
    block_size: int
    table_width: int
    max_rows: int


@dataclass(frozen=True)
class SamplingShape:
    """One rank's sampling. `logits_dtype`: of the logits; `max_bias`: M; `num_logprobs`: K; `max_rows`: largest S."""

    vocab_size: int
    logits_dtype: str
    max_bias: int
    num_logprobs: int
    max_rows: int

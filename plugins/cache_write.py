"""Cache write: this step's keys and values go to their slots; a pad's to the null block (per step, first launch).

    token t < query_starts[B]   slot_mapping[t]
    a pad                       block 0, whatever slot_mapping holds; its row of `out` becomes 0

Launch rule: `paged_attention_launch.cache_write_launch`.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from .cache_codes import quantize, scale_pointers, split_cache, to_codes
from .paged_attention import AttentionInputs


@triton.jit
def cache_write(
    k, v, key_cache, value_cache, slot_mapping, query_starts, out,
    rows: tl.constexpr, heads: tl.constexpr, group: tl.constexpr, num_kv_heads: tl.constexpr, head_size: tl.constexpr,
    head_pad: tl.constexpr, block_size: tl.constexpr, cache_dtype: tl.constexpr,
):  # fmt: skip
    """One token and `heads` of its KV heads. `rows` 0: as many as tokens, a decode step. `group`: query heads each."""
    token = tl.program_id(0)
    first = tl.program_id(1) * heads
    num_rows = rows if rows else tl.num_programs(0)
    is_pad = token >= tl.load(query_starts + num_rows)
    slot = tl.where(is_pad, token % block_size, tl.load(slot_mapping + token))

    head = first + tl.arange(0, heads)
    dim = tl.arange(0, head_pad)
    inside = (head < num_kv_heads)[:, None] & (dim < head_size)[None, :]
    source = (token * num_kv_heads + head)[:, None] * head_size + dim[None, :]
    line = (slot // block_size).to(tl.int64) * num_kv_heads + head
    offset = slot % block_size
    keys, values = tl.load(k + source, mask=inside, other=0.0), tl.load(v + source, mask=inside, other=0.0)
    _store(key_cache, keys, line, offset, inside, head < num_kv_heads, head_size, block_size, cache_dtype)
    _store(value_cache, values, line, offset, inside, head < num_kv_heads, head_size, block_size, cache_dtype)
    if is_pad:
        for member in range(group):
            query_head = head * group + member
            at = (token * num_kv_heads * group + query_head)[:, None] * head_size + dim[None, :]
            tl.store(out + at, tl.zeros_like(keys), mask=inside)


@triton.jit
def _store(
    cache, numbers, line, offset, inside, is_head,
    head_size: tl.constexpr, block_size: tl.constexpr, cache_dtype: tl.constexpr,
):  # fmt: skip
    """Numbers [heads, D] to place `offset` of their (block, head) lines."""
    dim = tl.arange(0, numbers.shape[1])
    if cache_dtype == "plain":
        at = (line * block_size + offset) * head_size
        tl.store(cache + at[:, None] + dim[None, :], numbers, mask=inside)
    else:
        codes, scales = to_codes(numbers.to(tl.float32), cache_dtype)
        at = line * (block_size * (head_size + 4))
        tl.store(cache + (at + offset * head_size)[:, None] + dim[None, :], codes, mask=inside)
        tl.store(scale_pointers(cache, at + block_size * head_size + offset * 4), scales, mask=is_head)


def write_cache(inputs: AttentionInputs, block_size: int, cache_dtype: str) -> None:
    """Oracle: write k and v into `inputs.key_cache` and `inputs.value_cache` in place.

    Caches are as `engines.io_table.device_cache_shape` says; `cache_dtype`: "int8", "float8_e4m3", or what they hold.
    """
    live = int(inputs.query_starts[-1])
    for numbers, cache in ((inputs.k, inputs.key_cache), (inputs.v, inputs.value_cache)):
        heads = cache.shape[1]
        lines = numbers.reshape(len(numbers), heads, -1)
        for token, line in enumerate(lines):
            slot = int(inputs.slot_mapping[token]) if token < live else token % block_size
            block, offset = divmod(slot, block_size)
            if cache.dtype == np.uint8:
                codes, scales = split_cache(cache.view(np.uint8), block_size)
                codes[block, :, offset], scales[block, :, offset] = quantize(line, cache_dtype)
            else:
                cache[block, :, offset] = line

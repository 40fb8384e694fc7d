"""What PagedAttention's kernels do, each its part, in NumPy over simulated memory (`plugins.paged_attention_launch`).

A body reads and writes what its kernel reads and writes and nothing else: of caches the slots and blocks that tables
name, of scratch the splits that a row has. An id past its table raises, where a real kernel would reach anywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.io_table import SCALE_BYTES
from ostinato.plugins.cache_codes import dequantize, quantize, split_cache

from .kernel_views import Views
from .memory import SimError

Array = NDArray[Any]
_LOG2_E = np.float32(np.log2(np.e))


def cache_write(views: Views) -> None:
    """Live tokens to their slots, pads to the null block; a pad's line of `out` becomes 0."""
    tokens, rows, block_size = views.grid[0], views["rows"] or views.grid[0], views["block_size"]
    live = int(views("query_starts", rows + 1)[-1])
    slots = np.arange(tokens) % block_size
    slots[:live] = views("slot_mapping", tokens)[:live]
    _check("slot", slots, views.form.num_blocks * block_size)
    block, offset = slots // block_size, slots % block_size
    for name, target in (("k", "key_cache"), ("v", "value_cache")):
        lines, cache = views(name, tokens, views["num_kv_heads"], views["head_size"]), _cache(views, target)
        if views["cache_dtype"] == "plain":
            cache[block, :, offset] = lines
            continue
        codes, scales = split_cache(cache, block_size)
        with np.errstate(invalid="ignore"):  # pads may be anything
            codes[block, :, offset], scales[block, :, offset] = quantize(lines, views["cache_dtype"])
    if live < tokens:
        views("out", tokens, views["num_kv_heads"] * views["group"] * views["head_size"])[live:] = 0


def decode_splits(views: Views) -> None:
    """Of every row with one new token: each split's best score, sum of weights and weighted values."""
    starts, contexts, tables = _paging(views, views.grid[0])
    heads, group, size = views["num_kv_heads"], views["group"], views["head_size"]
    lines = (views.grid[0], heads, group, views["num_splits"])
    bests, sums = views("split_best", *lines), views("split_weight", *lines)
    totals = views("split_total", *lines, size)
    queries = views("q", int(starts[-1]), heads, group, size)
    keys, values = _cache(views, "key_cache"), _cache(views, "value_cache")
    for row in np.flatnonzero(np.diff(starts) == 1):
        first, end, base, split = _cut(views, int(contexts[row]))
        low, k = _read(views, keys, tables[row], first, end)
        v = _read(views, values, tables[row], first, end)[1]
        scores = _scores(views, queries[starts[row]].astype(np.float32), k)  # [Hkv, group, positions from low]
        for piece, begin in enumerate(range(base, end, split)):
            part = slice(max(begin, first) - low, min(begin + split, end) - low)
            best = scores[..., part].max(-1, keepdims=True)
            weights = np.zeros_like(scores)
            np.exp2(scores[..., part] - best, out=weights[..., part])
            bests[row, ..., piece], sums[row, ..., piece] = best[..., 0], weights[..., part].sum(-1)
            totals[row, ..., piece, :] = _weighted(weights, v)


def decode_join(views: Views) -> None:
    """Joins the splits that `decode_splits` left."""
    rows, heads = views.grid[0], views.grid[1]
    best, weight, total = _splits(views, heads)
    starts, contexts = views("query_starts", rows + 1), views("context_lens", rows)
    out = views("out", int(starts[-1]), heads, views["head_size"])
    for row in np.flatnonzero(np.diff(starts) == 1):
        _, end, base, split = _cut(views, int(contexts[row]))
        used = slice(0, -(-(end - base) // split))
        fade = np.exp2(best[row, :, used] - best[row, :, used].max(-1, keepdims=True))
        sums = (total[row, :, used] * fade[..., None]).sum(1)
        out[starts[row]] = sums / (weight[row, :, used] * fade).sum(1)[:, None]


def prefill_attention(views: Views) -> None:
    """Rows of more than one token."""
    starts, contexts, tables = _paging(views, views["rows"])
    heads, group, size, window = views["num_kv_heads"], views["group"], views["head_size"], views["window"]
    queries, out = views("q", int(starts[-1]), heads, group, size), views("out", int(starts[-1]), heads, group, size)
    keys, values = _cache(views, "key_cache"), _cache(views, "value_cache")
    for row in np.flatnonzero(np.diff(starts) > 1):
        tokens, cached = slice(int(starts[row]), int(starts[row + 1])), int(contexts[row])
        end = cached + tokens.stop - tokens.start
        first = max(cached - window + 1, 0) if window else 0
        low, k = _read(views, keys, tables[row], first, end)
        v = _read(views, values, tables[row], first, end)[1]
        lines = queries[tokens].astype(np.float32).transpose(1, 2, 0, 3)  # [Hkv, group, new, D]
        scores = _scores(views, lines.reshape(heads, -1, size), k).reshape(*lines.shape[:3], -1)
        at, key = np.arange(cached, end)[:, None], low + np.arange(scores.shape[-1])
        visible = (key <= at) & (key > at - window) if window else key <= at
        scores = np.where(visible, scores, np.float32(-np.inf))
        weights = np.exp2(scores - scores.max(-1, keepdims=True))
        sums = weights.sum(-1, keepdims=True)
        found = _weighted(weights.reshape(heads, -1, weights.shape[-1]), v).reshape(lines.shape) / sums
        out[tokens] = found.transpose(2, 0, 1, 3)


def _paging(views: Views, rows: int) -> tuple[Array, Array, Array]:
    return (
        views("query_starts", rows + 1),
        views("context_lens", rows),
        views("block_tables", rows, views["table_width"]),
    )


def _splits(views: Views, heads: int) -> tuple[Array, Array, Array]:
    lines = (views.grid[0], heads, views["num_splits"])
    return views("split_best", *lines), views("split_weight", *lines), views("split_total", *lines, views["head_size"])


def _cache(views: Views, name: str) -> Array:
    heads, block_size, size = views["num_kv_heads"], views["block_size"], views["head_size"]
    if views["cache_dtype"] == "plain":
        return views(name, views.form.num_blocks, heads, block_size, size)
    return views(name, views.form.num_blocks, heads, block_size * (size + SCALE_BYTES))


def _read(views: Views, cache: Array, table: Array, first: int, end: int) -> tuple[int, Array]:
    """The blocks that hold positions [first, end), [n, Hkv, block, D], other positions 0, and where they begin."""
    size = views["block_size"]
    if not 0 <= first < end <= len(table) * size:
        raise SimError(f"{views.form.name}: a row's keys end at {end}, its table has {len(table)} blocks of {size}")
    low, blocks = first // size * size, table[first // size : -(-end // size)]
    _check("block", blocks, views.form.num_blocks)
    if views["cache_dtype"] == "plain":
        numbers = cache[blocks].astype(np.float32, copy=False)
    else:
        numbers = dequantize(*split_cache(cache[blocks], size), views["cache_dtype"])
    numbers[0, :, : first - low] = 0
    numbers[-1, :, size - (-end % size) :] = 0
    return low, numbers


def _scores(views: Views, queries: Array, keys: Array) -> Array:
    """Queries [Hkv, m, D] by blocks of keys [n, Hkv, block, D] → [Hkv, m, n * block], in powers of two."""
    by_block = queries @ keys.transpose(0, 1, 3, 2)  # [n, Hkv, m, block]
    scores: Array = by_block.transpose(1, 2, 0, 3).reshape(*queries.shape[:2], -1)
    scale, cap = np.float32(views["scale"]), np.float32(views["softcap"])
    if cap:
        return np.tanh(scores * (scale / cap)) * (cap * _LOG2_E)
    return scores * (scale * _LOG2_E)


def _weighted(weights: Array, values: Array) -> Array:
    """Weights [Hkv, m, n * block] by blocks of values [n, Hkv, block, D] → [Hkv, m, D]."""
    heads, lines, _ = weights.shape
    by_block = weights.reshape(heads, lines, len(values), -1).transpose(2, 0, 1, 3)
    weighted: Array = (by_block @ values).sum(0)
    return weighted


def _cut(views: Views, cached: int) -> tuple[int, int, int, int]:
    """As `decode_attention.cut`: first seen, end, where the first split begins, a split's length."""
    window, tile, end = views["window"], views["tile"], cached + 1
    first = max(end - window, 0) if window else 0
    base = first // tile * tile
    return first, end, base, max(-(-(end - base) // (views["num_splits"] * tile)) * tile, views["min_split"])


def _check(what: str, ids: Array, limit: int) -> None:
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < limit):
        raise SimError(f"a kernel is given a {what} from {int(ids.min())} to {int(ids.max())}, there are {limit}")

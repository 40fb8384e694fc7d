"""What StatefulSampling's and FeedTokens' kernels do, each its part, in NumPy over simulated memory.

Everything goes through the scratch that kernels hand to each other, in its own terms: ranks and masses are integers
as in `plugins.sampling_rank`, weights float64 as the oracle's. A pad's line of scratch is neither read nor written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.io_table import BIAS_PAD, IN_PROMPT
from ostinato.plugins.fused_sampling import GREEDY_BELOW

from .kernel_views import Views
from .memory import SimError

Array = NDArray[Any]
_ID_BITS, _LAST_ID = 20, (1 << 20) - 1
_INFINITE, _LOWEST, _NOTHING = 0x7F800000 << _ID_BITS, -(0x7F800000 << _ID_BITS), -(1 << 62)
_NO_SEARCH = 1 << 62
_UNIT, _VANISHED, _MARGIN = 2.0**42, -745.13, 0.5


def feed_tokens(views: Views) -> None:
    """`plugins.feed_tokens`."""
    tokens = views.grid[0]
    rows, ids = views("feed_rows", tokens), views("input_ids", tokens)
    fed = np.flatnonzero(rows >= 0)
    if len(fed):  # the last tokens' buffer is read as far as it is named
        ids[fed] = np.maximum(views("last_tokens", int(rows.max()) + 1)[rows[fed]], 0)


def adjust_logits(views: Views) -> None:
    """Bias and penalties; the best rank of every group of tokens, of all and of legal ones."""
    rows, size, groups, bias = views.grid[0], views["vocab_size"], views["num_groups"], views["max_bias"]
    logits, adjusted = views("logits", rows, size), views("adjusted", rows, size)
    ids, values = views("bias_ids", views.form.num_lines, bias), views("bias_values", views.form.num_lines, bias)
    best_any, best_legal = views("best_any", rows, groups), views("best_legal", rows, groups)
    repetition, presence, frequency = (views(name, rows) for name in ("repetition", "presence", "frequency"))
    for row, line in _live(views, rows):
        value = logits[row].astype(np.float32)
        for token, amount in zip(ids[line], values[line], strict=True):
            if token == BIAS_PAD:
                break
            value[token] += amount
        if (repetition[row], presence[row], frequency[row]) != (1, 0, 0):
            seen = views("counts", views.form.num_lines, size)[line]
            value = _penalized(value, seen, repetition[row], presence[row], frequency[row])
        adjusted[row] = value
        best_any[row] = best_legal[row] = _group_bests(value, np.arange(groups) * views["group"] < size, views)
        if (legal := _legal(views, row, rows)) is not None:
            value = np.where(legal, value, np.float32(-np.inf))
            is_group = np.asarray(_by_part(legal, groups, views["group"], 0).any(1))
            best_legal[row] = _group_bests(value, is_group, views)


def weigh_blocks(views: Views) -> None:
    """Masses of blocks, sums for the logprobs, and how many tokens of each reach the row's bound."""
    rows, size, blocks = views.grid[0], views["vocab_size"], views["num_blocks"]
    adjusted, bounds = views("adjusted", rows, size), views("bounds", rows, 1)
    sums, masses, sizes = (views(name, rows, blocks) for name in ("sums", "masses", "sizes"))
    heat, top_k, top_p, min_p, asked = (
        views(name, rows) for name in ("temperature", "top_k", "top_p", "min_p", "num_logprobs")
    )
    for row, _ in _live(views, rows):
        greatest, groups = _groups(views, row, rows)
        best = int(groups.max())
        bounds[row] = _NO_SEARCH
        if _is_error(greatest, best):
            continue
        value = adjusted[row]
        if asked[row] >= 0:
            sums[row] = _by_part(np.exp(value - _value(greatest)), blocks, views["block"], 0).sum(1)
        if top_k[row] == 1 or heat[row] < np.float32(GREEDY_BELOW):
            continue
        legal = _legal(views, row, rows)
        mass = _masses(value, _value(best), heat[row])
        mass = mass if legal is None else np.where(legal, mass, 0)
        masses[row] = _by_part(mass, blocks, views["block"], 0).sum(1)
        truncation = int(top_k[row]), float(top_p[row]), float(min_p[row])
        bounds[row] = bound = _bound(groups, best, float(heat[row]), truncation, size)
        sizes[row] = 0
        if bound != _NO_SEARCH:
            sizes[row] = _by_part(_reaching(value, legal, bound), blocks, views["block"], 0).sum(1)


def pack_candidates(views: Views) -> None:
    """Ids of the tokens that reach the bound, ascending; each block's from where the sizes before it end."""
    rows, size, blocks, block = views.grid[0], views["vocab_size"], views["num_blocks"], views["block"]
    adjusted, candidates = views("adjusted", rows, size), views("candidates", rows, size)
    sizes, bounds = views("sizes", rows, blocks), views("bounds", rows)
    for row, _ in _live(views, rows):
        if bounds[row] != _NO_SEARCH:
            ids = np.flatnonzero(_reaching(adjusted[row], _legal(views, row, rows), int(bounds[row])))
            starts = np.cumsum(sizes[row]) - sizes[row]
            places = starts[ids // block] + np.arange(len(ids)) - np.searchsorted(ids, ids // block * block)
            if len(ids) and not (places.min() >= 0 and places.max() < size):
                raise SimError("pack_candidates: the sizes of blocks are not those of this row")
            candidates[row, places] = ids


def draw_tokens(views: Views) -> None:
    """The token of every row: -1 for a pad and for a row in error."""
    rows, size = views.grid[0], views["vocab_size"]
    adjusted, tokens = views("adjusted", rows, size), views("tokens", rows)
    tokens[:] = -1
    heat, top_k, uniforms = (views(name, rows) for name in ("temperature", "top_k", "uniforms"))
    for row, _ in _live(views, rows):
        greatest, groups = _groups(views, row, rows)
        best = int(groups.max())
        if _is_error(greatest, best):
            continue
        tokens[row] = _id(best)
        if top_k[row] == 1 or heat[row] < np.float32(GREEDY_BELOW):
            continue
        ids = _kept(views, row, rows, best)
        mass = _masses(adjusted[row, ids], _value(best), heat[row])
        running = np.cumsum(mass)
        tokens[row] = ids[np.argmax(running > int(float(uniforms[row]) * float(running[-1])))]


def report_logprobs(views: Views) -> None:
    """Logprobs as far as a row asked for them; one more for its token in its line of the counts."""
    rows, size, slots = views.grid[0], views["vocab_size"], views["num_slots"]
    adjusted, tokens, counts = views("adjusted", rows, size), views("tokens", rows), None
    ids, values = views("top_ids", rows, slots), views("top_logprobs", rows, slots)
    logprobs, asked, sums = (
        views("logprobs", rows),
        views("num_logprobs", rows),
        views("sums", rows, views["num_blocks"]),
    )
    ids[:], values[:], logprobs[:] = -1, np.nan, np.nan
    for row, line in _live(views, rows):
        token, k = int(tokens[row]), min(int(asked[row]), slots, size)
        if k >= 0:
            logprobs[row] = values[row, :k] = -np.inf
        if token < 0:
            continue
        counts = views("counts_out", views.form.num_lines, size) if counts is None else counts
        counts[line, token] += 1
        if k >= 0:
            greatest = float(_value(int(views("best_any", rows, views["num_groups"])[row].max())))
            total = np.log(sums[row].astype(np.float64).sum())
            logprobs[row] = (float(adjusted[row, token]) - greatest) - total
            best = _best(adjusted[row], k)
            ids[row, :k] = best
            values[row, :k] = (adjusted[row, best].astype(np.float64) - greatest) - total


def _live(views: Views, rows: int) -> list[tuple[int, int]]:
    """Rows with a line of the state, and that line."""
    lines = views("state_rows", rows)
    if rows and int(lines.max()) >= views.form.num_lines:
        raise SimError(f"{views.form.name}: there is no line {int(lines.max())} of {views.form.num_lines}")
    return [(int(row), int(lines[row])) for row in np.flatnonzero(lines > 0)]


def _legal(views: Views, row: int, rows: int) -> NDArray[np.bool_] | None:
    """Flags of a masked row's tokens; only lines that rows name are read, the others may never have gone up."""
    line = int(views("mask_rows", rows)[row])
    if line < 0:
        return None
    if line >= rows:
        raise SimError(f"{views.form.name}: there is no line {line} of {rows} masks")
    bits = np.unpackbits(views("allowed", rows, views["words"])[line].view(np.uint8), bitorder="little")
    return bits[: views["vocab_size"]].view(np.bool_)


def _groups(views: Views, row: int, rows: int) -> tuple[int, Array]:
    """The greatest rank of all, and the legal ones' by group."""
    groups = views["num_groups"]
    return int(views("best_any", rows, groups)[row].max()), views("best_legal", rows, groups)[row]


def _penalized(value: Array, seen: Array, repetition: Any, presence: Any, frequency: Any) -> Array:
    in_output = (seen & (IN_PROMPT - 1)).astype(np.float32)
    weakened = np.where(value > 0, value / repetition, value * repetition)
    value = np.where(seen > 0, weakened, value)
    value = value - np.where(in_output > 0, presence, np.float32(0))
    penalized: Array = value - in_output * frequency
    return penalized


def _ranks(value: Array, ids: Array) -> Array:
    bits = np.ascontiguousarray(value).view(np.int32)
    key = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = np.where(value == 0, 0, key)
    key = np.where(value != value, 0x7FFFFFFF, key)
    ranks: Array = (key.astype(np.int64) << _ID_BITS) + (ids ^ _LAST_ID)
    return ranks


def _group_bests(value: Array, is_group: NDArray[np.bool_], views: Views) -> Array:
    """The best rank of every group; NOTHING of those that have no token. The first of equals has the lowest id."""
    groups, length = views["num_groups"], views["group"]
    whole = _by_part(value, groups, length, -np.inf)
    ids = whole.argmax(1) + np.arange(groups) * length
    return np.where(is_group, _ranks(whole.reshape(-1)[ids], ids), _NOTHING)


def _best(value: Array, k: int) -> Array:
    """Ids of the k best in strict order; none is NaN."""
    if not k:
        return np.zeros(0, np.int64)
    ids = np.flatnonzero(value >= np.partition(value, len(value) - k)[len(value) - k])
    best: Array = ids[np.argsort(-value[ids], kind="stable")[:k]]
    return best


def _value(rank: int) -> np.float32:
    key = rank >> _ID_BITS
    bits = np.array([key ^ 0x7FFFFFFF if key < 0 else key], np.int64).astype(np.int32)
    return np.float32(bits.view(np.float32)[0])


def _id(rank: int) -> int:
    return (rank & _LAST_ID) ^ _LAST_ID


def _is_error(greatest: int, best: int) -> bool:
    return greatest >= _INFINITE or best < _LOWEST


def _rank_reaching(cut: float) -> int:
    """The least rank of a logit at or above `cut` that is not -inf."""
    near = np.float32(cut)
    key = int(_ranks(np.array([near]), np.array([_LAST_ID]))[0]) >> _ID_BITS
    return max((key + (float(near) < cut)) << _ID_BITS, _LOWEST)


def _by_part(values: Array, parts: int, length: int, pad: float) -> Array:
    whole = np.full(parts * length, pad, values.dtype if values.dtype != np.bool_ else np.int32)
    whole[: len(values)] = values
    return whole.reshape(parts, length)


def _masses(value: Array, best: np.float32, heat: Any) -> Array:
    exponent = np.minimum(value.astype(np.float64) - float(best), 0) / float(heat)  # a masked one may be above
    mass = (np.exp(exponent) * _UNIT).astype(np.int64)
    return np.where(exponent > _VANISHED, np.maximum(mass, 1), 0)


def _reaching(value: Array, legal: NDArray[np.bool_] | None, bound: int) -> NDArray[np.bool_]:
    """Flags of the tokens whose rank is at least `bound`; none is NaN."""
    least = _value(bound)
    reaching: NDArray[np.bool_] = value >= least
    ties = np.flatnonzero(value == least)
    reaching[ties[ties > _id(bound)]] = False
    return reaching if legal is None else reaching & legal


def _bound(groups: Array, best: int, heat: float, truncation: tuple[int, float, float], size: int) -> int:
    """A rank that every kept token reaches, as `sampling_weigh` finds it; NO_SEARCH where nothing is cut."""
    k, p, least = truncation
    is_k = 0 < k < size
    if not (is_k or p < 1 or least > 0):
        return _NO_SEARCH
    bound = _LOWEST
    if is_k and k <= len(groups):
        bound = max(bound, int(np.partition(groups, len(groups) - k)[len(groups) - k]))
    if p < 1 and not is_k:
        share = (1 - p) * _MARGIN / size
        bound = max(bound, _rank_reaching(float(_value(best)) + heat * float(np.log(share))))
    if least > 0 and not (is_k and p < 1):
        bound = max(bound, _min_p_rank(best, heat, least))
    return bound


def _min_p_rank(best: int, heat: float, least: float) -> int:
    return min(_rank_reaching(float(_value(best)) + heat * float(np.log(least))), best)


def _kept(views: Views, row: int, rows: int, best: int) -> Array:
    """Ids that truncation leaves to draw from, ascending."""
    size, blocks = views["vocab_size"], views["num_blocks"]
    value, bound = views("adjusted", rows, size)[row], int(views("bounds", rows)[row])
    if bound == _NO_SEARCH:
        legal = _legal(views, row, rows)
        return np.arange(size) if legal is None else np.flatnonzero(legal)
    heat, k, p, least = (views(name, rows)[row] for name in ("temperature", "top_k", "top_p", "min_p"))
    count = int(views("sizes", rows, blocks)[row].sum())
    ids = views("candidates", rows, size)[row, :count]
    ranked = ids[np.argsort(-_ranks(value[ids], ids))]
    mass = _masses(value[ranked], _value(best), heat)
    whole = int(views("masses", rows, blocks)[row].sum())
    if 0 < k < size:
        ranked, mass = ranked[:k], mass[:k]
        whole = int(mass.sum())
    if p < 1:
        target = max(int(np.ceil(float(p) * float(whole))), 1)
        ranked = ranked[: int(np.searchsorted(np.cumsum(mass), target)) + 1]
    if least > 0:
        ranked = ranked[_ranks(value[ranked], ranked) >= _min_p_rank(best, float(heat), float(least))]
    return np.sort(ranked)

"""Optimization profiles for an engine that holds a whole rank (offline)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ostinato.engines.engine_record import EngineProfile, EngineTensor
from ostinato.engines.program import StepShape
from ostinato.engines.sizes import Limits

from .engine_job import Range, check_profiles, prefill_buckets, profile_shapes


def bucket_profiles(inputs: Iterable[EngineTensor], limits: Limits) -> tuple[EngineProfile, ...]:
    """One profile a decode bucket, of exactly its sizes, then one for all prefill buckets.

    A step that is captured again and again deserves tactics of its own; prefill steps are few, and the largest counts.
    """
    tensors = tuple(inputs)
    tokens, rows = prefill_buckets(limits), limits.max_rows
    ranges: dict[str, Mapping[str, Range]] = {
        StepShape("decode", count, count).key: _symbols(_exactly(count), count, limits) for count in limits.row_buckets
    }
    ranges["prefill"] = _symbols((tokens[0], tokens[-1], tokens[-1]), rows, limits)
    profiles = tuple(
        EngineProfile(name, {tensor.name: profile_shapes(tensor, by_symbol) for tensor in tensors})
        for name, by_symbol in ranges.items()
    )
    check_profiles(profiles)
    return profiles


def _symbols(tokens: Range, rows: int, limits: Limits) -> Mapping[str, Range]:
    """Every symbol of the I/O table that a graph leaves open; the pool and the state have one size a build."""
    return {
        "T": tokens,
        "B": _exactly(rows),
        "B+1": _exactly(rows + 1),
        "S": _exactly(rows),
        "P": _exactly(limits.max_blocks_per_row),
        "N": _exactly(limits.num_blocks),
        "R": _exactly(limits.num_state_lines),
    }


def _exactly(count: int) -> Range:
    return count, count, count

"""Padding for the CPU's plugin: exactly the buckets and pads that its kernels were warmed with, for any plan."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from ostinato.engines.sizes import Limits
from ostinato.runtime.openvino_padding import pad_tokens, padded, warmup_steps, with_end_row
from ostinato.runtime.plan import Plan
from ostinato.runtime.request import SamplingParams
from tests.fakes import Desk, make_limits, make_request

VOCAB = 40


def _bucket(count: int, buckets: Sequence[int]) -> int:
    return min(bucket for bucket in buckets if bucket >= count)


def _expected(plan: Plan, limits: Limits) -> dict[str, list[int] | list[list[int]]]:
    """Every padded array of a plan, token by token."""
    num_rows = _bucket(len(plan.rows), limits.row_buckets)
    num_pads = num_rows - len(plan.rows)
    num_tokens = _bucket(plan.num_tokens + num_pads, limits.token_buckets)
    ids, positions, starts, sampled = [], [], [0], []
    for row in plan.rows:
        for position in range(row.start, row.end):
            ids.append(row.request.tokens[position])
            positions.append(position)
            if position >= row.end - row.num_sampled:
                sampled.append(len(ids) - 1)
        starts.append(len(ids))
    longest = max(len(row.request.blocks) for row in plan.rows)
    width = 1
    while width < longest:
        width *= 2
    width = min(width, limits.max_blocks_per_row)
    tables = [row.request.blocks + [0] * (width - len(row.request.blocks)) for row in plan.rows]
    return {
        "input_ids": ids + [0] * (num_tokens - len(ids)),
        "positions": positions + [0] * (num_tokens - len(ids)),
        "query_starts": starts + [len(ids) + pad for pad in range(1, num_pads + 1)],
        "context_lens": [row.start for row in plan.rows] + [0] * num_pads,
        "block_tables": tables + [[0] * width] * num_pads,
        "logits_indices": sampled + [0] * (_bucket(len(sampled), limits.row_buckets) - len(sampled)),
    }


@pytest.mark.parametrize("seed", range(12))
def test_steps_are_padded_up_to_buckets_with_rows_of_the_null_block(seed: int) -> None:
    rng = random.Random(seed)
    limits = make_limits(
        block_size=rng.choice([1, 4, 16]), max_rows=rng.choice([1, 3, 8]), max_step_tokens=rng.choice([8, 20]),
        max_context=64, num_blocks=64,
    )  # fmt: skip
    desk = Desk(limits, VOCAB)
    for number in range(12):
        prompt = rng.choices(range(3), k=rng.randint(1, 30))
        params = SamplingParams(max_tokens=rng.randint(1, 12), prompt_logprobs=rng.choice([None, None, 0]))
        desk.submit(make_request(number, prompt, params, limits))
    while (plan := desk.scheduler.plan()) is not None:
        batch = desk.packer.pack(plan)
        step = padded(batch, limits)
        for name, expected in _expected(plan, limits).items():
            array = getattr(step, name)
            assert array.tolist() == expected, name
            assert array.dtype == np.int32
        assert step.query_starts[-1] == plan.num_tokens + pad_tokens(limits)[len(plan.rows)] <= len(step.input_ids)
        ended = with_end_row(step, limits.block_size)
        assert ended.query_starts.tolist() == [*step.query_starts.tolist(), len(step.input_ids)]
        assert ended.context_lens.tolist() == [*step.context_lens.tolist(), 0]
        assert ended.block_tables.shape[1] * limits.block_size >= len(step.input_ids) - step.query_starts[-1]
        assert not ended.block_tables[-1].any()
        assert (ended.block_tables[:-1, : step.block_tables.shape[1]] == step.block_tables).all()
        desk.scheduler.commit(plan, desk.executor.run(batch).wait())
    desk.check_idle()


@pytest.mark.parametrize("max_rows", [1, 6])
def test_warmup_steps_cover_every_bucket(max_rows: int) -> None:
    limits = make_limits(max_rows=max_rows, max_step_tokens=40)
    steps = warmup_steps(limits)
    rows_and_tails = {(len(step.context_lens), step.query_starts[-1] < len(step.input_ids)) for step in steps}
    wanted = {(rows, has_tail) for rows in limits.row_buckets for has_tail in (False, True)}
    assert rows_and_tails == wanted - {(limits.max_step_tokens, True)}
    assert {len(step.input_ids) for step in steps} == set(limits.token_buckets)
    assert {len(step.logits_indices) for step in steps} == set(limits.row_buckets)
    for step in steps:
        assert not step.block_tables.any()
        assert step.positions.max() < step.block_tables.shape[1] * limits.block_size
        assert (np.diff(step.query_starts) > 0).all()
        assert (np.diff(step.logits_indices) > 0).all()

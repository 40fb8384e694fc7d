"""Packing: every promise of a Batch holds for any plan, and block tables follow their rows."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engines.sizes import Limits
from ostinato.runtime.batch import Batch, Packer, warmup_batches
from ostinato.runtime.pages import Pages
from ostinato.runtime.plan import Plan, PlanRow
from ostinato.runtime.request import SamplingParams
from ostinato.runtime.scheduler import Scheduler
from tests.fakes import Desk, check_batch, make_limits, make_request

VOCAB = 40


def _plain(plan: Plan, limits: Limits) -> dict[str, list[int] | list[list[int]]]:
    """The live part of a batch, one token at a time."""
    tokens, positions, slots, starts, sampled = [], [], [], [0], []
    for row in plan.rows:
        for position in range(row.start, row.end):
            tokens.append(row.request.tokens[position])
            positions.append(position)
            block = row.request.blocks[position // limits.block_size]
            slots.append(block * limits.block_size + position % limits.block_size)
            if position >= row.end - row.num_sampled:
                sampled.append(len(tokens) - 1)
        starts.append(len(tokens))
    return {
        "input_ids": tokens,
        "positions": positions,
        "slot_mapping": slots,
        "query_starts": starts,
        "context_lens": [row.start for row in plan.rows],
        "logits_indices": sampled,
    }


def _compare(batch: Batch, plan: Plan, limits: Limits) -> None:
    for name, expected in _plain(plan, limits).items():
        assert getattr(batch, name)[: len(expected)].tolist() == expected, name
    for line, row in zip(batch.block_tables, plan.rows, strict=False):
        blocks = row.request.blocks
        assert line[: len(blocks)].tolist() == blocks
        assert not line[len(blocks) :].any()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_batch_equals_its_plan(seed: int) -> None:
    rng = random.Random(seed)
    limits = make_limits(
        block_size=rng.choice([1, 4, 16]),
        max_rows=rng.choice([1, 3, 8]),
        max_step_tokens=rng.choice([8, 20]),
        max_context=64,
        num_blocks=64,
    )
    desk = Desk(limits, VOCAB)
    for number in range(12):
        prompt = rng.choices(range(3), k=rng.randint(1, 30))
        params = SamplingParams(max_tokens=rng.randint(1, 12), prompt_logprobs=rng.choice([None, None, 0]))
        desk.submit(make_request(number, prompt, params, limits))
    while (plan := desk.scheduler.plan()) is not None:
        batch = desk.packer.pack(plan)
        _compare(batch, plan, limits)
        desk.scheduler.commit(plan, desk.executor.run(batch).wait())
    desk.check_idle()


def test_a_batch_is_not_changed_by_the_next() -> None:
    limits = make_limits()
    desk = Desk(limits, VOCAB)
    desk.submit(*(make_request(number, [number] * 20, SamplingParams(max_tokens=9), limits) for number in range(3)))
    plan = desk.scheduler.plan()
    assert plan is not None
    batch = desk.packer.pack(plan)
    copies = [
        np.array(array) for array in (batch.input_ids, batch.block_tables, batch.slot_mapping, batch.query_starts)
    ]
    desk.scheduler.commit(plan, desk.executor.run(batch).wait())
    desk.run()
    for copy, array in zip(
        copies, (batch.input_ids, batch.block_tables, batch.slot_mapping, batch.query_starts), strict=True
    ):
        assert (copy == array).all()


def test_shapes_are_buckets_and_pads_lie_in_the_null_block() -> None:
    limits = make_limits(max_rows=8, max_step_tokens=64, max_context=300, num_blocks=64)
    scheduler, packer = Scheduler(limits, Pages(limits)), Packer(limits, VOCAB)
    for number in range(3):
        scheduler.submit(make_request(number, [1] * (7 * number + 1), SamplingParams(), limits))
    plan = scheduler.plan()
    assert plan is not None
    batch = packer.pack(plan)
    check_batch(batch, limits)
    assert (batch.num_rows, batch.num_tokens, batch.num_sampled) == (3, 24, 3)
    assert batch.input_ids.shape == (32,)
    assert batch.query_starts.tolist() == [0, 1, 9, 24, 25]
    assert batch.block_tables.shape == (4, 1)
    assert batch.logits_indices.tolist() == [0, 8, 23, 0]


def test_a_row_that_comes_back_has_only_its_new_blocks() -> None:
    limits = make_limits(block_size=4, max_rows=2, max_context=32, num_blocks=16)
    desk = Desk(limits, VOCAB)
    old = make_request(0, [1] * 30, SamplingParams(max_tokens=2, temperature=0.0), limits)
    desk.submit(old)
    desk.step()
    desk.scheduler.preempt(old)
    hog = make_request(1, [2] * 9, SamplingParams(max_tokens=9, temperature=0.0), limits)
    hog.priority = -1  # takes the blocks that the other one had
    desk.submit(hog)
    plan = desk.scheduler.plan()
    assert plan is not None
    assert [row.request.id for row in plan.rows] == [1, 0]
    batch = desk.packer.pack(plan)
    _compare(batch, plan, limits)
    desk.scheduler.commit(plan, desk.executor.run(batch).wait())
    desk.run()


@pytest.mark.parametrize("max_rows", [1, 6])
def test_warmup_batches_cover_every_bucket(max_rows: int) -> None:
    limits = make_limits(max_rows=max_rows, max_step_tokens=40)
    batches = warmup_batches(limits)
    rows_and_tails = {(len(batch.context_lens), batch.num_tokens < len(batch.input_ids)) for batch in batches}
    wanted = {(rows, has_tail) for rows in limits.row_buckets for has_tail in (False, True)}
    assert rows_and_tails == wanted - {(limits.max_step_tokens, True)}
    assert {len(batch.input_ids) for batch in batches} == set(limits.token_buckets)
    assert {len(batch.logits_indices) for batch in batches} == set(limits.row_buckets)
    for batch in batches:
        assert not batch.block_tables.any()
        assert batch.slot_mapping.max() < limits.block_size
        assert batch.query_starts[-1] == batch.num_tokens <= len(batch.input_ids)
        assert (np.diff(batch.query_starts) > 0).all()
        assert (np.diff(batch.logits_indices) > 0).all()


def test_a_step_that_samples_nothing_has_no_lines() -> None:
    limits = make_limits(max_rows=4, max_step_tokens=8)
    request = make_request(0, [1] * 20, SamplingParams(), limits)
    pages = Pages(limits)
    assert pages.admit(request)
    batch = Packer(limits, VOCAB).pack(Plan((PlanRow(request, 0, 8, 0),), 8, 0))
    check_batch(batch, limits)
    assert batch.num_sampled == 0
    assert batch.sampling.temperature.shape == (0,)

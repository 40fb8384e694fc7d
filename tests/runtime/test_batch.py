"""Packing: every promise of a Batch holds for any plan, and block tables follow their rows."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engines.sizes import Limits
from ostinato.runtime.batch import Batch, Packer
from ostinato.runtime.pages import Pages
from ostinato.runtime.plan import Plan, PlanRow
from ostinato.runtime.request import Request, SamplingParams, Status
from tests.fakes import Desk, bucket_rules, check_batch, make_limits, make_request

VOCAB = 40


def _plain(plan: Plan, limits: Limits) -> dict[str, list[int] | list[list[int]]]:
    """A batch's arrays, one token at a time."""
    tokens, positions, slots, starts, sampled = [], [], [], [0], []
    for row in plan.rows:
        for position in range(row.start, row.end):
            tokens.append(0 if row.fed_from >= 0 else row.request.tokens[position])
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
        assert getattr(batch, name).tolist() == expected, name
    for line, row in zip(batch.block_tables, plan.rows, strict=True):
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


def test_shapes_are_those_of_the_plan() -> None:
    limits = make_limits(max_rows=8, max_step_tokens=64, max_context=300, num_blocks=64)
    desk = Desk(limits, VOCAB)
    desk.submit(*(make_request(number, [1] * (7 * number + 1), SamplingParams(), limits) for number in range(3)))
    plan = desk.scheduler.plan()
    assert plan is not None
    batch = desk.packer.pack(plan)
    check_batch(batch, limits)
    assert (batch.num_rows, batch.num_tokens, batch.num_sampled) == (3, 24, 3)
    assert batch.query_starts.tolist() == [0, 1, 9, 24]
    assert batch.block_tables.shape == (3, 1)
    assert batch.logits_indices.tolist() == [0, 8, 23]
    assert batch.feed_rows is None


def _seated(limits: Limits, lengths: list[int], output: int = 0) -> list[Request]:
    """Requests with prompts of those lengths, so many tokens of output, and blocks for all of it and one token more."""
    pages = Pages(limits)
    requests = [
        make_request(number, [number + 1] * length, SamplingParams(), limits) for number, length in enumerate(lengths)
    ]
    for request in requests:
        assert pages.admit(request)
        request.tokens += [30 + request.id] * output
        assert pages.grow(request, len(request.tokens) + 1)
    return requests


def _fed(request: Request, line: int) -> PlanRow:
    return PlanRow(request, len(request.tokens), len(request.tokens) + 1, 1, line)


def _known(request: Request) -> PlanRow:
    return PlanRow(request, len(request.tokens) - 1, len(request.tokens), 1)


def test_a_fed_row_says_where_its_token_comes_from() -> None:
    limits = make_limits(block_size=4)
    one, two, three, four = _seated(limits, [5, 7, 4, 12], output=2)
    packer = Packer(limits, VOCAB, bucket_rules(limits))
    chunk = PlanRow(four, 3, 9, 0)
    for rows, expected in (
        ([_fed(one, 2), _fed(two, 0)], [2, 0]),
        ([_known(one), _fed(two, 4), _known(three)], [-1, 4, -1]),
        ([_fed(two, 1), chunk, _fed(three, 0)], [1, *[-1] * 6, 0]),
    ):
        plan = Plan(tuple(rows), sum(row.num_tokens for row in rows), sum(row.num_sampled for row in rows))
        batch = packer.pack(plan)
        assert batch.feed_rows is not None
        assert batch.feed_rows.tolist() == expected
        check_batch(batch, limits)
        _compare(batch, plan, limits)


def test_sets_of_rows_that_take_turns_keep_their_seats() -> None:
    """As they do where several stages each have a step; blocks grow and change hands meanwhile."""
    limits = make_limits(block_size=2, max_rows=6, max_context=64, num_blocks=200)
    rng = random.Random(0)
    packer = Packer(limits, VOCAB, replace(bucket_rules(limits), num_in_flight=3))
    requests = _seated(limits, [3, 5, 2, 7, 4, 6])
    free = list(range(100, 400))
    for step in range(120):
        chosen = [request for request in requests if request.id % 3 == step % 3]
        if rng.random() < 0.1:
            rng.shuffle(chosen)
        if rng.random() < 0.1:  # preempted, and back with other blocks
            count = len(chosen[0].blocks)
            free, chosen[0].blocks = free[count:] + chosen[0].blocks, free[:count]
            chosen[0].num_preemptions += 1
        elif rng.random() < 0.1:  # somebody else in its place
            requests.remove(chosen[0])
            chosen[0].status = Status.FINISHED
            heir = make_request(chosen[0].id + 3, chosen[0].tokens[:4], SamplingParams(), limits)
            heir.blocks = chosen[0].blocks
            chosen[0] = heir
            requests.append(heir)
        plan = Plan(tuple(_known(request) for request in chosen), len(chosen), len(chosen))
        batch = packer.pack(plan)
        check_batch(batch, limits)
        _compare(batch, plan, limits)
        for request in chosen:
            request.tokens.append(rng.randrange(VOCAB))
            if len(request.tokens) > 2 * len(request.blocks):
                request.blocks.append(free.pop())


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


def test_a_step_that_samples_nothing_has_no_lines() -> None:
    limits = make_limits(max_rows=4, max_step_tokens=8)
    request = make_request(0, [1] * 20, SamplingParams(), limits)
    pages = Pages(limits)
    assert pages.admit(request)
    batch = Packer(limits, VOCAB, bucket_rules(limits)).pack(Plan((PlanRow(request, 0, 8, 0),), 8, 0))
    check_batch(batch, limits)
    assert batch.num_sampled == 0
    assert batch.sampling.temperature.shape == (0,)

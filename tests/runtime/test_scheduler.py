"""What a step of the scheduler holds, in which order, and who gives way."""

from __future__ import annotations

from tests.fakes import Desk, make_limits, make_request
from tests.scheduling import VOCAB, greedy, prompt_of, rows_of


def test_a_step_holds_decode_rows_then_chunks_then_new_rows() -> None:
    limits = make_limits(max_rows=4, max_step_tokens=16)
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(0, prompt_of(0, 5), greedy(9), limits))
    assert rows_of(desk.step()) == [(0, 5, 1)]
    desk.submit(
        make_request(1, prompt_of(1, 40), greedy(9), limits), make_request(2, prompt_of(2, 8), greedy(9), limits)
    )
    assert rows_of(desk.step()) == [(0, 1, 1), (1, 15, 0)]
    assert rows_of(desk.step()) == [(0, 1, 1), (1, 15, 0)]
    # The last chunk leaves 5 tokens; one of them is kept for the pad row of three in a bucket of four.
    assert rows_of(desk.step()) == [(0, 1, 1), (1, 10, 1), (2, 4, 0)]
    assert rows_of(desk.step()) == [(0, 1, 1), (1, 1, 1), (2, 4, 1)]
    assert rows_of(desk.step()) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    desk.run()


def test_rows_and_tokens_of_a_step_are_bounded() -> None:
    limits = make_limits(max_rows=5, max_step_tokens=24, num_blocks=200)
    desk = Desk(limits, VOCAB)
    desk.submit(*(make_request(number, prompt_of(number, number % 30 + 1), greedy(6), limits) for number in range(40)))
    while (plan := desk.step()) is not None:
        assert len(plan.rows) <= 5
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows) <= 24
        assert plan.num_sampled == sum(row.num_sampled for row in plan.rows) <= 5
    desk.check_idle()


def test_a_lower_priority_number_starts_first_and_gives_way_last() -> None:
    limits = make_limits(block_size=4, max_rows=2, max_context=32, num_blocks=8)
    desk = Desk(limits, VOCAB)
    requests = [make_request(number, prompt_of(number, 8), greedy(20), limits) for number in range(3)]
    for request, priority in zip(requests, (1, 0, 0), strict=True):
        request.priority = priority
    desk.submit(*requests)
    assert [row[0] for row in rows_of(desk.step())] == [1, 2]
    desk.run()
    assert requests[1].num_preemptions == 0
    assert requests[2].num_preemptions > 0


def test_an_older_row_of_a_lower_priority_gives_way() -> None:
    limits = make_limits(block_size=4, max_rows=2, max_context=32, num_blocks=8)
    desk = Desk(limits, VOCAB)
    older, newer = (make_request(number, prompt_of(number, 8), greedy(20), limits) for number in range(2))
    older.priority = 5
    desk.submit(older)
    desk.step()
    desk.submit(newer)
    desk.run()
    assert older.num_preemptions > 0
    assert newer.num_preemptions == 0


def test_a_preempted_request_returns_before_those_that_never_started() -> None:
    limits = make_limits(max_rows=2)
    desk = Desk(limits, VOCAB)
    requests = [make_request(number, prompt_of(number, 20), greedy(5), limits) for number in range(4)]
    desk.submit(*requests)
    desk.step()
    desk.scheduler.preempt(requests[1])
    desk.scheduler.preempt(requests[0])
    assert [row[0] for row in rows_of(desk.step())] == [0, 1]
    desk.run()

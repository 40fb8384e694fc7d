"""Why those who wait have to: rows, blocks, tokens of a step, or the share of their tenant."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.engines.sizes import Limits
from ostinato.runtime.request import Request
from tests.fakes import Desk, make_limits, make_request
from tests.scheduling import VOCAB, greedy, prompt_of


def desk_with(limits: Limits, *sizes: int) -> Desk:
    """A desk and a request a prompt size, in that order."""
    desk = Desk(limits, VOCAB)
    desk.submit(*(request(limits, number, size) for number, size in enumerate(sizes)))
    return desk


def request(limits: Limits, number: int, size: int, tenant: str = "", max_tokens: int = 8) -> Request:
    made = make_request(number, prompt_of(number, size), greedy(max_tokens), limits)
    made.tenant = tenant
    return made


@pytest.mark.parametrize(
    ("bounds", "sizes", "reason"),
    [
        ({"max_rows": 1}, (5, 5), "slots"),
        ({"num_blocks": 4, "max_context": 64}, (40, 40), "blocks"),
        ({"max_step_tokens": 16}, (40, 5), "budget"),
        ({}, (5, 5), "turn"),
    ],
)
def test_what_holds_a_waiter_back_is_told(bounds: dict[str, Any], sizes: tuple[int, ...], reason: str) -> None:
    desk = desk_with(make_limits(**bounds), *sizes)
    assert desk.scheduler.waiting_reason == "turn"
    desk.step()
    assert desk.scheduler.waiting_reason == reason
    assert desk.scheduler.num_waiting == (reason != "turn")
    desk.run()
    assert desk.scheduler.waiting_reason == "turn"


def test_a_row_that_gave_its_blocks_up_waits_for_blocks() -> None:
    limits = make_limits(block_size=4, num_blocks=8, max_context=32)
    desk = Desk(limits, VOCAB)
    desk.submit(*(request(limits, number, 8, max_tokens=16) for number in range(2)))
    reasons = set()
    while desk.step() is not None:
        if desk.scheduler.num_preemptions and desk.scheduler.num_waiting:
            reasons.add(desk.scheduler.waiting_reason)
    assert desk.scheduler.num_preemptions
    assert reasons == {"blocks"}
    desk.check_idle()


def test_a_tenant_gets_its_share_of_the_rows_and_others_pass() -> None:
    limits = make_limits(max_rows=4)
    desk = Desk(limits, VOCAB)
    desk.scheduler.admission.max_rows_per_tenant = 2
    greedy_ones = [request(limits, number, 5, "a") for number in range(4)]
    other = request(limits, 9, 5, "b")
    desk.submit(*greedy_ones, other)
    plan = desk.step()
    assert plan is not None
    assert [row.request for row in plan.rows] == [*greedy_ones[:2], other]
    assert desk.scheduler.waiting_reason == "tenant"
    most = 0
    while desk.step() is not None:
        most = max(most, sum(one.tenant == "a" for one in desk.scheduler._running))
    assert most == 2
    assert {desk.finish(number) for number in (0, 1, 2, 3, 9)} == {"length"}
    desk.check_idle()

"""Who is refused, who waits, and who may overtake."""

from __future__ import annotations

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.context import check_fits
from ostinato.runtime.request import SamplingParams
from ostinato.runtime.waiting import MAX_OVERTAKES
from tests.fakes import Desk, make_limits, make_request
from tests.scheduling import VOCAB, greedy, prompt_of, rows_of


def test_a_request_that_can_never_fit_is_refused_and_others_run() -> None:
    limits = make_limits(max_context=4096, num_blocks=64)
    assert limits.max_context == 1024  # clamped to the pool
    with pytest.raises(RequestError, match=r"1500 tokens.*1024") as refused:
        check_fits(1500, None, limits)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(RequestError, match=r"1000 tokens and max_tokens is 500") as refused:
        check_fits(1000, 500, limits)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_tokens")
    desk = Desk(limits, VOCAB)
    largest = make_request(0, prompt_of(0, 1000), SamplingParams(ignore_eos=True), limits)
    desk.submit(largest, *(make_request(number, prompt_of(number, 10), greedy(4), limits) for number in range(1, 21)))
    desk.run(max_steps=400)
    assert [desk.finish(number) for number in range(21)] == ["length"] * 21
    assert largest.num_output == 24


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [
        (126, None, 2),
        (126, 0, 0),
        (126, 2, 2),
        (126, 3, None),
        (127, None, 1),
        (127, 0, 0),
        (127, 1, 1),
        (127, 2, None),
        (127, 10**9, None),
        (128, None, None),
        (128, 0, None),
        (128, 1, None),
        (129, None, None),
        (129, 0, None),
    ],
)
def test_the_context_edge(num_prompt: int, max_tokens: int | None, expected: int | None) -> None:
    limits = make_limits(max_context=128)
    if expected is not None:
        assert check_fits(num_prompt, max_tokens, limits) == expected
        desk = Desk(limits, VOCAB)
        desk.submit(make_request(0, prompt_of(0, num_prompt), SamplingParams(max_tokens=max_tokens), limits))
        desk.run()
        assert (len(desk.token_ids(0)), desk.finish(0)) == (expected, "length")
        return
    with pytest.raises(RequestError) as refused:
        check_fits(num_prompt, max_tokens, limits)
    assert refused.value.code == "context_length_exceeded"
    assert str(num_prompt) in str(refused.value)
    assert "128" in str(refused.value)
    assert "-" not in str(refused.value)


def test_light_requests_pass_a_heavy_one_and_do_not_starve_it() -> None:
    """A long run holds 53 to 64 of 100 blocks, a heavy waiter needs 50, a light one comes every other step."""
    limits = make_limits(max_rows=64, max_context=1024, max_step_tokens=1024, num_blocks=100)
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(0, prompt_of(0, 832), greedy(190), limits))
    desk.step()
    desk.submit(make_request(1, prompt_of(1, 800), greedy(5), limits))
    started: dict[int, int] = {}
    arrived: dict[int, int] = {}
    long_ended = 0
    for step in range(600):
        if step % 2 == 0:
            arrived[100 + step] = step
            desk.submit(make_request(100 + step, prompt_of(step, 10), greedy(3), limits))
        for request_id, _, _ in rows_of(desk.step()):
            started.setdefault(request_id, step)
        if desk.finish(0) is None:
            long_ended = step + 1
    assert 100 < long_ended < 500
    assert started[1] - long_ended <= 1, "the heavy one did not get its turn"
    waits = {number: started[number] - step for number, step in arrived.items()}
    passed = [number for number in arrived if started[number] < started[1]]
    assert len(passed) == MAX_OVERTAKES
    assert all(waits[number] == 0 for number in passed), "a light one that fits waited before the bound"
    assert (
        max(started[number] - max(step, started[1]) for number, step in arrived.items() if number not in passed) <= 30
    )
    desk.run()
    assert all(desk.finish(number) == "length" for number in (0, 1, *arrived))


def test_a_stuck_line_moves_when_a_waiter_leaves() -> None:
    limits = make_limits(max_rows=8, max_context=512, max_step_tokens=512, num_blocks=40)
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(0, prompt_of(0, 300), greedy(200), limits))
    desk.step()
    desk.submit(make_request(1, prompt_of(1, 400), greedy(5), limits))
    for waiter in desk.scheduler._line.ahead():
        waiter.num_overtaken = MAX_OVERTAKES
    light = make_request(2, prompt_of(2, 10), greedy(5), limits)
    desk.submit(light)
    desk.step()
    assert not light.blocks
    desk.abort(1)
    desk.step()
    assert light.blocks
    desk.run()


def test_a_waiter_starts_once_the_prompt_that_it_shares_is_computed() -> None:
    """It finds room for its own blocks only, so it need not wait until any come back."""
    limits = make_limits(block_size=4, max_step_tokens=16, max_context=40, num_blocks=10)
    prompt = prompt_of(0, 24)
    desk = Desk(limits, VOCAB)
    desk.submit(make_request(0, prompt, greedy(8), limits))
    desk.step()
    desk.submit(make_request(1, [*prompt, *prompt_of(1, 8)], greedy(2), limits))
    desk.step()
    assert (desk.scheduler.num_running, desk.scheduler.num_waiting) == (1, 1)
    desk.step()
    assert (desk.scheduler.num_running, desk.scheduler.num_waiting) == (2, 0)
    desk.run()
    assert desk.events[1][0].num_cached == 24

"""The loop: its steps, what a failing step does, when it is in trouble, and how it sleeps and ends."""

from __future__ import annotations

import threading

import pytest

from ostinato.engines.errors import DeviceError
from ostinato.runtime.flight import StepTimes
from ostinato.runtime.loop import MAX_FAILURES_IN_A_ROW, STALL_SECONDS, Loop
from ostinato.runtime.request import STEP_FAILED, Event, SamplingParams
from tests.fakes import PosLM, make_limits, make_request
from tests.serving import PATIENCE_SECONDS, VOCAB_SIZE, FaultyLM, GatedLM, await_true, make_loop

LIMITS = make_limits(max_rows=4, max_step_tokens=16)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ears:
    """Keeps what a loop says."""

    def __init__(self) -> None:
        self.steps: list[list[Event]] = []
        self.threads: set[str] = set()
        self.has_ended = threading.Event()

    def emit(self, events: list[Event]) -> None:
        self.steps.append(events)
        self.threads.add(threading.current_thread().name)

    def ended(self) -> None:
        self.has_ended.set()

    def finishes(self) -> dict[int, str]:
        return {event.request_id: event.finish for step in self.steps for event in step if event.finish}

    def token_ids(self, request_id: int) -> list[int | None]:
        return [event.token_id for step in self.steps for event in step if event.request_id == request_id]


def offline_ids(prompts: dict[int, list[int]]) -> dict[int, list[int | None]]:
    """Each request alone, driven by the caller."""
    found = {}
    for number, prompt in prompts.items():
        loop = make_loop(LIMITS, PosLM(LIMITS, VOCAB_SIZE))
        loop.submit(make_request(number, prompt, PARAMS, LIMITS))
        found[number] = [event.token_id for step in loop.run_until_idle() for event in step]
    return found


PROMPTS = {1: [1, 2, 3], 2: [4] * 40, 3: [5, 6]}


def test_driven_by_a_caller_all_requests_end_and_all_blocks_come_back() -> None:
    loop = make_loop(LIMITS, PosLM(LIMITS, VOCAB_SIZE))
    for number, prompt in PROMPTS.items():
        loop.submit(make_request(number, prompt, PARAMS, LIMITS))
    steps = list(loop.run_until_idle())
    for number, alone in offline_ids(PROMPTS).items():
        assert [event.token_id for step in steps for event in step if event.request_id == number] == alone
        assert len(alone) == PARAMS.max_tokens
    assert loop.scheduler.pages.num_free == loop.scheduler.pages.num_total


def test_its_own_thread_gives_the_same_tokens() -> None:
    loop, ears = make_loop(LIMITS, PosLM(LIMITS, VOCAB_SIZE)), Ears()
    loop.start(ears)
    for number, prompt in PROMPTS.items():
        loop.submit(make_request(number, prompt, PARAMS, LIMITS))
    await_true(lambda: len(ears.finishes()) == len(PROMPTS), "requests did not end")
    assert {number: ears.token_ids(number) for number in PROMPTS} == offline_ids(PROMPTS)
    assert ears.threads == {"loop"}
    loop.close()
    assert ears.has_ended.is_set()


def test_an_aborted_request_has_no_row_in_the_next_step() -> None:
    gated, ears = GatedLM(PosLM(LIMITS, VOCAB_SIZE)), Ears()
    loop = make_loop(LIMITS, gated)
    loop.start(ears)
    loop.submit(make_request(1, [1, 2], SamplingParams(max_tokens=50, ignore_eos=True), LIMITS))
    gated.await_step()
    loop.submit(make_request(2, [3, 4], SamplingParams(max_tokens=3, ignore_eos=True), LIMITS))
    gated.permit()
    gated.await_step()
    loop.abort(1)
    loop.abort(1)
    loop.abort(77)
    gated.permit(20)
    await_true(lambda: loop.scheduler.is_idle, "request 2 did not end")
    assert [batch.num_rows for batch in gated.batches] == [1, 2, 1, 1]
    loop.close()
    assert len([token for token in ears.token_ids(2) if token is not None]) == 3
    assert ears.finishes() == {1: "abort", 2: "length"}


def test_a_failed_step_ends_its_own_requests_and_the_next_ones_are_right() -> None:
    faulty, ears = FaultyLM(PosLM(LIMITS, VOCAB_SIZE), DeviceError("the device is gone: restart it")), Ears()
    loop = make_loop(LIMITS, faulty)
    loop.start(ears)
    faulty.is_bad = True
    loop.submit(make_request(8, [1, 2], PARAMS, LIMITS))
    await_true(lambda: 8 in ears.finishes(), "the request did not end")
    faulty.is_bad = False
    loop.submit(make_request(1, PROMPTS[1], PARAMS, LIMITS))
    await_true(lambda: 1 in ears.finishes(), "the next request did not end")
    loop.close()
    assert ears.finishes() == {8: "error", 1: "length"}
    error = ears.steps[0][0].error
    assert error is not None
    assert (str(error), error.code) == ("the device is gone: restart it", STEP_FAILED)
    assert ears.token_ids(1) == offline_ids(PROMPTS)[1]
    assert loop.scheduler.pages.num_free == loop.scheduler.pages.num_total


def test_an_interrupted_step_ends_its_requests_and_the_caller_can_go_on() -> None:
    faulty = FaultyLM(PosLM(LIMITS, VOCAB_SIZE), KeyboardInterrupt())
    loop = make_loop(LIMITS, faulty)
    faulty.is_bad = True
    loop.submit(make_request(8, [1, 2], PARAMS, LIMITS))
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    faulty.is_bad = False
    assert loop.scheduler.is_idle
    loop.submit(make_request(1, PROMPTS[1], PARAMS, LIMITS))
    ended, *events = [event for step in loop.run_until_idle() for event in step]
    assert (ended.request_id, ended.finish) == (8, "error")
    assert [event.token_id for event in events] == offline_ids(PROMPTS)[1]


def test_an_unknown_failure_does_not_show_its_inside() -> None:
    faulty = FaultyLM(PosLM(LIMITS, VOCAB_SIZE), ValueError("secret path"))
    faulty.is_bad = True
    loop = make_loop(LIMITS, faulty)
    loop.submit(make_request(1, [1], PARAMS, LIMITS))
    (event,) = loop.step()
    assert "secret" not in str(event.error)


def test_failures_in_a_row_are_trouble_until_a_step_succeeds() -> None:
    faulty, ears = FaultyLM(PosLM(LIMITS, VOCAB_SIZE), DeviceError("no")), Ears()
    loop = make_loop(LIMITS, faulty)
    assert loop.trouble() == "the loop is not running"
    loop.start(ears)
    faulty.is_bad = True
    for number in range(MAX_FAILURES_IN_A_ROW):
        assert loop.trouble() is None
        loop.submit(make_request(number, [1], PARAMS, LIMITS))
        await_true(lambda: len(ears.finishes()) > number, "the request did not end")  # noqa: B023
    assert loop.trouble() is not None
    faulty.is_bad = False
    loop.submit(make_request(9, [1], PARAMS, LIMITS))
    await_true(lambda: 9 in ears.finishes(), "the request did not end")
    assert loop.trouble() is None
    loop.close()
    assert loop.trouble() == "the loop is not running"


def test_a_step_that_hangs_is_a_stall_and_idleness_is_none() -> None:
    clock, gated = Clock(), GatedLM(PosLM(LIMITS, VOCAB_SIZE))
    loop = make_loop(LIMITS, gated, clock)
    loop.start(Ears())
    clock.now += 10 * STALL_SECONDS
    assert loop.trouble() is None
    loop.submit(make_request(1, [1], SamplingParams(max_tokens=3, ignore_eos=True), LIMITS))
    gated.await_step()
    clock.now += STALL_SECONDS - 1
    assert loop.trouble() is None
    gated.permit()
    gated.await_step()
    clock.now += STALL_SECONDS - 1  # longer than allowed since the request came, but a step ended meanwhile
    assert loop.trouble() is None
    clock.now += 2
    assert loop.trouble() == "no step has finished for 10 s"
    gated.permit(2)
    await_true(lambda: loop.scheduler.is_idle and loop.trouble() is None, "the stall was not forgotten")
    loop.close()


def test_broken_books_end_the_loop_instead_of_serving_on() -> None:
    loop, ears = make_loop(LIMITS, PosLM(LIMITS, VOCAB_SIZE)), Ears()
    loop.start(ears)
    loop.scheduler.pages._blank.pop()  # lose a block
    loop.submit(make_request(1, [1], PARAMS, LIMITS))
    assert ears.has_ended.wait(PATIENCE_SECONDS)
    assert ears.finishes() == {1: "length"}
    await_true(lambda: loop.trouble() == "the loop is not running", "the loop went on")


def test_an_idle_loop_sleeps() -> None:
    loop = make_loop(LIMITS, PosLM(LIMITS, VOCAB_SIZE))
    checks: list[int] = []
    check = loop.scheduler.pages.check_integrity

    def counted() -> None:
        checks.append(1)
        check()

    loop.scheduler.pages.check_integrity = counted  # type: ignore[method-assign]
    ears = Ears()
    loop.start(ears)
    loop.submit(make_request(1, [1], PARAMS, LIMITS))
    await_true(lambda: 1 in ears.finishes() and loop.scheduler.is_idle and not loop._is_busy, "not idle again")
    assert len(checks) <= 2  # once before the request, if the thread was that quick, and once after
    loop.close()


def test_an_observer_sees_every_step_with_its_time() -> None:
    clock = Clock()
    loop = make_loop(LIMITS, PosLM(LIMITS, VOCAB_SIZE), clock)
    seen: list[StepTimes] = []
    loop.observe_step = seen.append
    loop.submit(make_request(1, [1] * 20, SamplingParams(max_tokens=2, ignore_eos=True), LIMITS))
    list(loop.run_until_idle())
    assert [(step.num_rows, step.num_tokens) for step in seen] == [(1, 16), (1, 4), (1, 1)]
    assert all(step[5:] == (0.0,) * 6 for step in seen)  # the clock stands still
    assert {(step.num_sampled, step.launched_at, step.landed_at) for step in seen} == {(0, 0.0, 0.0), (1, 0.0, 0.0)}


def test_only_one_driver_is_allowed() -> None:
    loop = make_loop(LIMITS, PosLM(LIMITS, VOCAB_SIZE))
    loop.start(Ears())
    with pytest.raises(AssertionError):
        next(loop.run_until_idle())
    loop.close()
    assert isinstance(loop, Loop)

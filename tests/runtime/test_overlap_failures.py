"""Steps in flight that fail: their own rows end and no others, no block is lost, and the rest is right."""

from __future__ import annotations

import random

import pytest

from ostinato.engines.errors import DeviceError
from ostinato.runtime.executor import StepRules
from ostinato.runtime.request import STEP_FAILED, Request, SamplingParams
from tests.fakes import PosLM, make_limits, make_request
from tests.overlap_fakes import HashGuide, LaggingLM, overlap_rules, pipeline_rules
from tests.overlap_requests import VOCAB, Band
from tests.scale import scaled

LIMITS = make_limits(max_rows=4, max_step_tokens=16, max_context=96, num_blocks=40)
NUM_REQUESTS = 9
PLACES = [(place, number) for place in ("launch", "wait", "sample") for number in range(scaled(9, 40))]


def _request(number: int) -> Request:
    params = SamplingParams(temperature=0.9, seed=number, max_tokens=3 + number % 5, ignore_eos=True)
    request = make_request(number, [number] * (1 + 7 * (number % 3)), params, LIMITS)
    request.guide = HashGuide(VOCAB) if number % 3 == 1 else None
    return request


def _solo_ids() -> dict[int, list[int]]:
    band = Band(LIMITS, PosLM(LIMITS, VOCAB))
    band.submit(*(_request(number) for number in range(NUM_REQUESTS)))
    band.run()
    return {number: band.token_ids(number) for number in range(NUM_REQUESTS)}


SOLO = _solo_ids()


def _rows_of_steps(band: Band) -> list[list[int]]:
    """Filled while the band plays: the requests of each step, by launch."""
    steps: list[list[int]] = []
    plan = band.scheduler.plan

    def watched() -> object:
        found = plan()
        if found is not None:
            steps.append([row.request.id for row in found.rows])
        return found

    band.scheduler.plan = watched  # type: ignore[method-assign, assignment]
    return steps


@pytest.mark.parametrize("rules", [overlap_rules(LIMITS), pipeline_rules(LIMITS, 3)], ids=["overlap", "pipeline"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]}{place[1]}")
def test_a_failed_step_ends_its_own_rows(rules: StepRules, place: tuple[str, int]) -> None:
    lagging = LaggingLM(LIMITS, VOCAB, rules, random.Random(place[1]))
    lagging.faults[place] = DeviceError("the step was lost: try again")
    band = Band(LIMITS, lagging)
    steps = _rows_of_steps(band)
    for number in range(NUM_REQUESTS):
        band.submit(_request(number))
        band.step()
        band.pages.check_integrity()
    band.run()
    has_failed = place in lagging.log
    lost = set(steps[place[1]]) if has_failed else set()
    for number in range(NUM_REQUESTS):
        if band.finish(number) == "error":
            assert number in lost
            error = band.events[number][-1].error
            assert error is not None
            assert (str(error), error.code) == ("the step was lost: try again", STEP_FAILED)
            told = band.token_ids(number)
            assert told == SOLO[number][: len(told)]
        else:
            assert band.token_ids(number) == SOLO[number]
    ended = {number for number in range(NUM_REQUESTS) if band.finish(number) == "error"}
    assert ended or not has_failed or place[1] > 0
    lagging.faults.clear()  # of a step that did not come
    band.submit(make_request(99, [1, 2], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), LIMITS))
    band.run()
    assert band.finish(99) == "length"


def test_what_flies_behind_a_failed_step_goes_on() -> None:
    """Request 1 is alone in step 0, which fails at its end; request 2 came with step 1, which is right."""
    limits = make_limits(max_rows=4, max_step_tokens=4, num_blocks=40)
    lagging = LaggingLM(limits, VOCAB, overlap_rules(limits))
    lagging.faults["wait", 0] = DeviceError("no")
    band = Band(limits, lagging)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    band.submit(make_request(1, [1, 2, 3, 4], params, limits), make_request(2, [5, 6], params, limits))
    events = band.step()
    assert [(event.request_id, event.finish) for event in events] == [(1, "error")]
    assert [batch.num_rows for batch in lagging.batches] == [1, 2]
    band.run()
    alone = Band(limits, PosLM(limits, VOCAB))
    alone.submit(make_request(2, [5, 6], params, limits))
    alone.run()
    assert band.token_ids(2) == alone.token_ids(2)


def test_a_refused_launch_still_gives_the_tokens_of_the_step_before() -> None:
    lagging = LaggingLM(LIMITS, VOCAB, overlap_rules(LIMITS))
    lagging.faults["launch", 3] = DeviceError("no")
    band = Band(LIMITS, lagging)
    band.submit(_request(3))
    band.run()
    assert band.token_ids(3) == SOLO[3][:3]
    assert band.finish(3) == "error"


@pytest.mark.parametrize("fails_at", range(1, 8))
@pytest.mark.parametrize("is_lagging", [True, False])
def test_a_guide_that_raises_ends_only_its_request(fails_at: int, is_lagging: bool) -> None:
    executor = LaggingLM(LIMITS, VOCAB, overlap_rules(LIMITS)) if is_lagging else PosLM(LIMITS, VOCAB)
    band = Band(LIMITS, executor)
    lost = _request(4)
    lost.guide = HashGuide(VOCAB, fails_at)
    band.submit(lost, _request(3), _request(1))
    band.run()
    assert band.token_ids(4) == SOLO[4][: (fails_at - 1) // 2]
    error = band.events[4][-1].error
    assert error is not None
    assert error.code == STEP_FAILED
    assert "lost" not in str(error)
    assert (band.token_ids(3), band.token_ids(1)) == (SOLO[3], SOLO[1])


@pytest.mark.parametrize("number", range(1, 4))
@pytest.mark.parametrize("place", ["launch", "wait", "sample"])
def test_an_interrupt_leaves_right_books(place: str, number: int, caplog: pytest.LogCaptureFixture) -> None:
    lagging = LaggingLM(LIMITS, VOCAB, overlap_rules(LIMITS))
    band = Band(LIMITS, lagging)
    band.submit(*(_request(number) for number in (1, 3, 6)))
    lagging.faults[place, number] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        band.run()
    band.pages.check_integrity()
    band.submit(_request(5))
    band.run()
    assert band.token_ids(5) == SOLO[5]
    for number in (1, 3, 6):  # nobody aborts them: those of the interrupted step end, and no event of another is lost
        told = band.token_ids(number)
        assert told == (SOLO[number][: len(told)] if band.finish(number) == "error" else SOLO[number])
    assert not caplog.records, "who interrupted was told of a failure"


def test_trouble_ends_every_request_and_refuses_new_ones() -> None:
    lagging = LaggingLM(LIMITS, VOCAB, overlap_rules(LIMITS))
    band = Band(LIMITS, lagging)
    band.submit(*(_request(number) for number in range(7)))
    for _ in range(2):
        band.step()
    assert lagging.num_in_flight == 1
    assert band.scheduler.num_waiting > 0
    told = {number: band.token_ids(number) for number in range(7)}
    lagging.trouble = "rank 1 has died: restart the server"
    num_calls = len(lagging.log)
    band.step()
    for number in range(7):
        last = band.events[number][-1]
        assert last.finish in ("error", "length")
        if last.error is not None:
            assert (str(last.error), last.error.code) == (lagging.trouble, STEP_FAILED)
            assert band.token_ids(number) == told[number]
    band.check_idle()
    band.submit(_request(8))
    (event,) = band.step()
    assert (event.request_id, event.finish) == (8, "error")
    band.check_idle()
    assert len(lagging.log) == num_calls, "a dead executor was called"

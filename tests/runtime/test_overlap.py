"""Overlap: step N + 1 is launched before the tokens of N are read, and a late stop drops exactly the surplus token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ostinato.runtime.choice import ChoiceStream
from ostinato.runtime.request import Event, SamplingParams
from tests.fakes import PosLM, make_limits, make_request
from tests.overlap_fakes import HashGuide, LaggingLM, overlap_rules, pipeline_rules
from tests.overlap_requests import VOCAB, Band
from tests.serving import VOCAB_SIZE, toy_tokenizer

LIMITS = make_limits(max_rows=6, max_step_tokens=32, max_context=96, num_blocks=64)
PLAIN: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
KINDS: dict[str, SamplingParams] = {
    "plain": SamplingParams(temperature=0.0, **PLAIN),
    "seeded": SamplingParams(temperature=0.9, seed=7, **PLAIN),
    "stop ids": SamplingParams(temperature=0.9, seed=7, stop_token_ids=(62, 63), **PLAIN),
    "min_tokens": SamplingParams(temperature=0.9, seed=7, min_tokens=8, stop_token_ids=tuple(range(32)), **PLAIN),
    "penalties": SamplingParams(presence_penalty=2.0, frequency_penalty=1.0, repetition_penalty=1.5, seed=7, **PLAIN),
    "bias": SamplingParams(temperature=0.0, logit_bias=((5, 4.0), (9, 2.0)), **PLAIN),
    "guided": SamplingParams(temperature=0.9, seed=7, **PLAIN),
}


def _lagging(limits: Any = LIMITS, seed: int | None = None, vocab_size: int = VOCAB) -> LaggingLM:
    rng = None if seed is None else random.Random(seed)
    return LaggingLM(limits, vocab_size, overlap_rules(limits), rng)


def _request(kind: str, number: int = 1) -> Any:
    request = make_request(number, [number, 2, 3], KINDS[kind], LIMITS)
    request.guide = HashGuide(VOCAB) if kind == "guided" else None
    return request


def _solo(kind: str, number: int = 1) -> list[Event]:
    band = Band(LIMITS, PosLM(LIMITS, VOCAB))
    band.submit(_request(kind, number))
    band.run()
    return band.events[number]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_read(kind: str) -> None:
    lagging = _lagging()
    band = Band(LIMITS, lagging)
    band.submit(_request(kind))
    band.run()
    assert band.events[1] == _solo(kind)
    num_steps = len(lagging.batches)
    at = {entry: index for index, entry in enumerate(lagging.log)}
    assert num_steps >= 8
    for number in range(num_steps - 1):
        assert at["launch", number + 1] < at["wait", number]
        if kind == "guided":  # its mask hangs on the token: the forward part runs meanwhile
            assert at["wait", number] < at["sample", number + 1] < at["wait", number + 1]
    assert kind == "guided" or not any(place == "sample" for place, _ in lagging.log)
    assert all((batch.feed_rows is not None) == bool(number) for number, batch in enumerate(lagging.batches))


def test_rows_of_all_kinds_side_by_side_are_as_alone() -> None:
    for seed in (None, 1, 2, 3):
        band = Band(LIMITS, _lagging(seed=seed))
        band.submit(*(_request(kind, number) for number, kind in enumerate(list(KINDS)[1:])))
        band.run()
        for number, kind in enumerate(list(KINDS)[1:]):
            assert band.outcome(number) == [event._replace(num_cached=0) for event in _solo(kind, number)]


def test_stop_strings_end_a_choice_while_its_next_step_runs(tmp_path: Path) -> None:
    """As the bridge and LLM do it: a stream of the events, and an abort once its stop string was found."""
    tokenizer = toy_tokenizer(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    seen = _text_of(params, Band(LIMITS, PosLM(LIMITS, VOCAB_SIZE), vocab_size=VOCAB_SIZE), tokenizer)
    assert len(seen[0]) > 20
    for at in (3, 7, 12):
        stopped = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=(seen[0][at : at + 2],))
        plain = _text_of(stopped, Band(LIMITS, PosLM(LIMITS, VOCAB_SIZE), vocab_size=VOCAB_SIZE), tokenizer)
        lagging = _lagging(vocab_size=VOCAB_SIZE)
        assert _text_of(stopped, Band(LIMITS, lagging, vocab_size=VOCAB_SIZE), tokenizer) == plain
        assert plain[1] == "stop"
        order = {entry: index for index, entry in enumerate(lagging.log)}
        assert all(order["launch", n + 1] < order["wait", n] for n in range(len(lagging.batches) - 1))


def _text_of(params: SamplingParams, band: Band, tokenizer: Any) -> tuple[str, str | None, int]:
    """(text, how it ended, tokens counted) of one choice."""
    stream = ChoiceStream(tokenizer, [65, 66], params)
    texts: list[str] = []

    def take(event: Event) -> None:
        if (delta := stream.push(event)) is not None:
            texts.append(delta.text)
        if stream.wants_abort:
            band.loop.abort(event.request_id)

    band.on_event = take
    band.submit(make_request(1, [65, 66], params, LIMITS))
    band.run()
    return "".join(texts), stream.finish_reason, stream.completion_tokens


# Late stops


def _computed(lagging: LaggingLM) -> int:
    return sum(batch.num_tokens for batch in lagging.batches)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_late_stop_discards_exactly_the_surplus_token(at: int) -> None:
    tokens = [event.token_id for event in _solo("seeded")]
    stop = tokens[at]
    assert stop is not None
    assert stop not in tokens[:at]
    params = SamplingParams(temperature=0.9, seed=7, stop_token_ids=(stop,), **PLAIN)
    lagging = _lagging()
    band = Band(LIMITS, lagging)
    band.submit(make_request(1, [1, 2, 3], params, LIMITS))
    band.run()
    assert (band.token_ids(1), band.finish(1)) == (tokens[: at + 1], "stop")
    assert _computed(lagging) == 3 + at + 1  # prompt, the tokens before the stop, and the stop itself: the surplus


def test_a_length_that_is_known_before_computes_nothing_more() -> None:
    lagging = _lagging()
    band = Band(LIMITS, lagging)
    band.submit(_request("plain"))
    band.run()
    assert _computed(lagging) == 3 + PLAIN["max_tokens"] - 1


def test_an_ended_request_holds_its_blocks_until_its_last_step_lands() -> None:
    band = Band(LIMITS, _lagging())
    request = _request("plain")
    band.submit(request)
    band.step()
    assert request.num_in_flight == 1
    band.loop.abort(1)
    band.loop._drain_inbox()
    (event,) = band.loop._events
    assert event.finish == "abort"
    assert request.blocks
    assert not band.scheduler.is_idle
    assert band.scheduler.num_running == 0
    band.step()
    assert not request.blocks
    band.check_idle()


def test_nothing_is_preempted_while_a_step_is_in_flight() -> None:
    limits = make_limits(block_size=4, max_rows=4, max_context=40, num_blocks=12)
    lagging = _lagging(limits)
    band = Band(limits, lagging)
    preempt = band.scheduler.preempt

    def preempt_watched(request: Any) -> None:
        assert lagging.num_in_flight == 0
        preempt(request)

    band.scheduler.preempt = preempt_watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    band.submit(*(make_request(number, [number] * 6, params, limits) for number in range(4)))
    band.run()
    assert band.scheduler.num_preemptions > 2
    for number in range(4):
        alone = Band(limits, PosLM(limits, VOCAB))
        alone.submit(make_request(number, [number] * 6, params, limits))
        alone.run()
        assert band.token_ids(number) == alone.token_ids(number)


def test_a_prompt_that_is_scored_is_not_planned_while_it_is_in_flight() -> None:
    limits = make_limits(max_rows=8, max_step_tokens=8, max_context=96, num_blocks=32)
    for rules in (overlap_rules(limits), pipeline_rules(limits, 3)):
        lagging = LaggingLM(limits, VOCAB, rules)
        band = Band(limits, lagging)
        request = make_request(1, list(range(20)), SamplingParams(max_tokens=3, prompt_logprobs=0), limits)
        band.submit(request)
        while not request.is_scored:
            band.step()
            assert lagging.num_in_flight == 0
        band.run()
        assert len(band.token_ids(1)) == 3


@pytest.mark.parametrize("is_lagging", [True, False])
def test_full_blocks_of_output_are_shared_and_a_surplus_token_is_not(is_lagging: bool) -> None:
    limits = make_limits(block_size=4, max_rows=2, max_context=64, num_blocks=32)
    tokens = [event.token_id or 0 for event in _solo("plain")]
    stop = tokens[8]
    assert stop not in tokens[:8]
    params = SamplingParams(temperature=0.0, stop_token_ids=(stop,), **PLAIN)
    band = Band(limits, _lagging(limits) if is_lagging else PosLM(limits, VOCAB))
    band.submit(make_request(1, [1, 2, 3], params, limits))
    band.run()
    assert band.token_ids(1) == tokens[:9]
    prompt = [1, 2, 3, *tokens[:9], 4]  # 12 of them are whole blocks; the last of the 12 was only sampled
    band.submit(make_request(2, prompt, SamplingParams(max_tokens=1), limits))
    band.run()
    assert band.events[2][0].num_cached == 8


# Pipelines


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_pipeline_has_a_micro_batch_for_every_stage(num_stages: int) -> None:
    limits = make_limits(max_rows=12, max_step_tokens=64, max_context=96, num_blocks=100)
    lagging = LaggingLM(limits, VOCAB, pipeline_rules(limits, num_stages))
    band = Band(limits, lagging)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    band.submit(*(make_request(number, [number, 7], params, limits) for number in range(12)))
    for _ in range(2):
        band.step()
    for _ in range(20):
        rows = [batch.num_rows for batch in lagging.batches[-num_stages:]]
        assert rows == [12 // num_stages] * num_stages
        assert lagging.num_in_flight == num_stages - 1  # one has just landed
        band.step()
    band.run()
    assert all(batch.feed_rows is None for batch in lagging.batches)


def test_chunks_of_one_prompt_follow_each_other_through_a_pipeline() -> None:
    limits = make_limits(max_rows=2, max_step_tokens=8, max_context=96, num_blocks=32)
    lagging = LaggingLM(limits, VOCAB, pipeline_rules(limits, 3))
    band = Band(limits, lagging)
    prompt = list(range(40))
    band.submit(make_request(1, prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), limits))
    band.step()
    assert [batch.num_tokens for batch in lagging.batches] == [8, 8, 8]
    band.run()
    alone = Band(limits, PosLM(limits, VOCAB))
    alone.submit(make_request(1, prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), limits))
    alone.run()
    assert band.token_ids(1) == alone.token_ids(1)

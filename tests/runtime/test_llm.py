"""LLM: callers who leave early, who interrupt, who read two streams at once, and who pass what it can't use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.batch import Batch
from ostinato.runtime.executor import Ticket
from ostinato.runtime.flight import StepTimes
from ostinato.runtime.llm import LLM
from ostinato.runtime.request import SamplingParams
from tests.fakes import PosLM, make_limits
from tests.serving import VOCAB_SIZE, make_intake, make_loop, toy_tokenizer

LIMITS = make_limits(max_rows=4)
PARAMS = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)


class InterruptedLM(PosLM):
    """Ctrl-C in its step number `at`."""

    at = -1

    def run(self, batch: Batch) -> Any:
        ticket: Ticket = super().run(batch)
        if self.num_steps == self.at:
            raise KeyboardInterrupt
        return ticket


class ToyLLM(LLM):
    """Over an executor without a model."""

    def __init__(self, folder: Path) -> None:
        self.executor = InterruptedLM(LIMITS, VOCAB_SIZE)
        loop = make_loop(LIMITS, self.executor)
        shop: Any = SimpleNamespace(loop=loop, intake=make_intake(LIMITS), tokenizer=toy_tokenizer(folder))
        self._shop = shop
        self._progress = False
        self._rows = {}
        self._stepping = threading.RLock()
        self._is_closed = False

    def check_idle(self) -> None:
        """Nothing is left of any call, once the loop has heard of those that were left."""
        list(self._shop.loop.run_until_idle())
        scheduler = self._shop.loop.scheduler
        assert scheduler.is_idle
        assert not self._rows
        assert scheduler.pages.num_free == scheduler.pages.num_total


@pytest.fixture
def llm(tmp_path: Path) -> ToyLLM:
    return ToyLLM(tmp_path)


def texts(llm: LLM, *prompts: str) -> list[str]:
    return [completion.choices[0].text for completion in llm.generate(prompts, PARAMS)]


def streamed(llm: LLM, prompt: str) -> str:
    return "".join(delta.text for delta in llm.stream(prompt, PARAMS))


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_a_stream_that_is_left_ends_its_row_and_changes_no_later_call(llm: ToyLLM, num_read: int) -> None:
    expected = texts(llm, "ab", "c")
    stream: Any = llm.stream("left", PARAMS)
    for _ in range(num_read):
        next(stream)
    stream.close()
    num_steps = llm.executor.num_steps
    llm.check_idle()
    assert llm.executor.num_steps == num_steps
    stream = llm.stream("left", PARAMS)
    next(stream)
    del stream
    assert streamed(llm, "ab") == expected[0]
    assert texts(llm, "ab", "c") == expected
    llm.check_idle()


def test_calls_between_two_reads_of_a_stream_get_what_is_theirs(llm: ToyLLM) -> None:
    expected = texts(llm, "ab", "c", "def")
    one, other = llm.stream("ab", PARAMS), llm.stream("c", PARAMS)
    found = [next(one).text, next(other).text]
    assert texts(llm, "def") == expected[2:]
    for index, stream in enumerate((one, other)):
        found[index] += "".join(delta.text for delta in stream)
    assert found == expected[:2]
    llm.check_idle()


@pytest.mark.parametrize("at", [1, 4])
def test_after_an_interrupt_the_next_call_is_right(llm: ToyLLM, at: int) -> None:
    expected = texts(llm, "ab", "c")
    llm.executor.num_steps, llm.executor.at = 0, at
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x"] * 6, PARAMS)
    llm.executor.at = -1
    llm.check_idle()
    assert texts(llm, "ab", "c") == expected


def test_a_bad_prompt_among_good_ones_starts_nothing(llm: ToyLLM) -> None:
    for bad in ("", [VOCAB_SIZE], [-1], "y" * 128):
        with pytest.raises(RequestError):
            llm.generate(["a", bad, "b"], PARAMS)
        llm.check_idle()
    assert llm.executor.num_steps == 0
    assert llm.generate([], PARAMS) == []


WRONG: dict[str, Callable[[Any], object]] = {
    "a text for prompts": lambda llm: llm.generate("abc", PARAMS),
    "a prompt of no kind": lambda llm: llm.generate([5], PARAMS),
    "no prompt": lambda llm: llm.generate([None], PARAMS),
    "ids that are texts": lambda llm: llm.generate([["a"]], PARAMS),
    "ids that are broken": lambda llm: llm.generate([[1.5]], PARAMS),
    "params that are none": lambda llm: llm.generate(["a"], {"max_tokens": 1}),
    "too few params": lambda llm: llm.generate(["a", "b"], [PARAMS]),
    "two choices of a stream": lambda llm: next(llm.stream("a", SamplingParams(n=2))),
    "messages that are text": lambda llm: llm.chat_ids("hello"),
    "messages that are no objects": lambda llm: llm.chat_ids(["hello"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_it_can_not_use_is_a_request_error(llm: ToyLLM, name: str) -> None:
    with pytest.raises(RequestError):
        WRONG[name](llm)
    llm.check_idle()


def test_after_close_every_call_says_so(llm: ToyLLM) -> None:
    stream: Any = llm.stream("left", PARAMS)
    next(stream)
    llm.close()
    for call in (lambda: next(stream), lambda: texts(llm, "ab"), lambda: streamed(llm, "ab")):
        with pytest.raises(RequestError, match="closed: open the bundle again"):
            call()
    llm.close()
    llm.check_idle()


def test_a_second_thread_is_refused_and_harms_nobody(llm: ToyLLM) -> None:
    """It comes in the middle of a step."""
    expected = texts(llm, "ab", "c")
    refusals: list[RequestError] = []

    def intrude() -> None:
        with pytest.raises(RequestError, match="another thread runs this LLM") as refusal:
            texts(llm, "def")
        refusals.append(refusal.value)

    def observe(times: StepTimes) -> None:
        if not refusals:
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()

    llm._shop.loop.observe_step = observe
    assert texts(llm, "ab", "c") == expected
    assert len(refusals) == 1
    assert texts(llm, "def") == [streamed(llm, "def")]
    llm.check_idle()

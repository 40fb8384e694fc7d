"""Stop strings against a short oracle that holds nothing and sees the whole text."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from ostinato.runtime.choice import ChoiceStream
from ostinato.runtime.request import Event, SamplingParams
from ostinato.runtime.stops import StopMatcher
from ostinato.runtime.tokenizer import Tokenizer
from tests.tokenizers import byte_level

NUM_CASES = 20_000
ALPHABET = "abc"
WORDS = ["".join(chars) for width in (1, 2, 3) for chars in itertools.product(ALPHABET, repeat=width)]
FIRST_WORD = 300


def oracle(words: list[str], stops: tuple[str, ...], include: bool, min_tokens: int) -> tuple[str, int | None]:
    """(the shown text, the tokens it took to a stop or None): after every word, look at all the text so far."""
    text, check_from = "", 0
    for count, word in enumerate(words, 1):
        text += word
        if count <= min_tokens:
            check_from = len(text)
            continue
        found = [(start, -len(stop)) for stop in stops if (start := text.find(stop, check_from)) >= 0]
        if found:
            start, minus_width = min(found)
            return text[: start - minus_width if include else start], count
    return text, None


def longest_candidate(text: str, stops: tuple[str, ...]) -> str:
    """The longest suffix that is a stop's beginning but not all of it."""
    for width in range(len(text), 0, -1):
        if any(stop != text[-width:] and stop.startswith(text[-width:]) for stop in stops):
            return text[-width:]
    return ""


def test_random_streams_agree_with_the_oracle(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path, {FIRST_WORD + i: word for i, word in enumerate(WORDS)}))
    rng = random.Random(5)
    num_stopped = 0
    for _ in range(NUM_CASES):
        words = [rng.choice(WORDS) for _ in range(rng.randint(1, 8))]
        stops = tuple("".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 6))) for _ in range(rng.randint(1, 4)))
        include, min_tokens = rng.random() < 0.5, rng.choice([0, 0, 0, 1, 2, 5])
        right, num_tokens = oracle(words, stops, include, min_tokens)
        params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
        choice = ChoiceStream(tokenizer, [], params)
        shown = ""
        for count, word in enumerate(words, 1):
            finish = "length" if count == len(words) else None
            delta = choice.push(Event(0, FIRST_WORD + WORDS.index(word), None, finish))
            shown += delta.text if delta else ""
            assert right.startswith(shown)
        assert shown == right
        assert choice.finish_reason == ("length" if num_tokens is None else "stop")
        assert choice.completion_tokens == (num_tokens or len(words))
        assert choice.wants_abort == (num_tokens is not None and num_tokens < len(words))
        num_stopped += num_tokens is not None
    assert NUM_CASES // 4 < num_stopped < NUM_CASES


def test_only_the_longest_candidate_is_held() -> None:
    rng = random.Random(6)
    for _ in range(2000):
        stops = tuple("".join(rng.choice(ALPHABET) for _ in range(rng.randint(2, 7))) for _ in range(rng.randint(1, 4)))
        matcher = StopMatcher(stops, include=False)
        text = shown = ""
        for _ in range(10):
            piece = "".join(rng.choice(ALPHABET) for _ in range(rng.randint(0, 4)))
            text += piece
            part, stopped = matcher.push(piece)
            shown += part
            if stopped:
                break
            assert shown == text.removesuffix(longest_candidate(text, stops))
        else:
            assert shown + matcher.flush() == text
            assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "include", "pieces", "shown"),
    [
        (("DE",), False, ["ABC", "DEFG"], "ABC"),
        (("DE",), True, ["ABC", "DEFG"], "ABCDE"),
        (("EF", "DEF"), False, ["ABC", "DEFG"], "ABC"),
        (("ab", "abc"), True, ["xabcd"], "xabc"),  # start together: the longest
        (("ab", "abc"), True, ["xab", "cd"], "xab"),  # complete: waits for no longer one
        (("bc", "abcd"), False, ["abc"], "a"),
        (("aab",), False, ["aa", "ab"], "a"),  # the candidate slides on
    ],
)
def test_which_stop_wins(stops: tuple[str, ...], include: bool, pieces: list[str], shown: str) -> None:
    matcher = StopMatcher(stops, include)
    text = ""
    for piece in pieces:
        part, stopped = matcher.push(piece)
        text += part
        if stopped:
            break
    assert stopped
    assert text == shown


def test_text_that_is_no_candidate_passes_at_once() -> None:
    matcher = StopMatcher(("\n\nObservation: done",), include=False)
    for piece in ("alpha", " beta", " gamma", "<tag>", "\tObservation: done"):
        assert matcher.push(piece) == (piece, False)
    assert matcher.push("x\n") == ("x", False)
    assert matcher.push("\n") == ("", False)
    assert matcher.push("\nOb") == ("\n", False)
    assert matcher.push("ject") == ("\n\nObject", False)

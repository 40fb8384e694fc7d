"""A choice's deltas: text, tokens, logprobs and the end, event by event."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.choice import ChoiceStream, Delta
from ostinato.runtime.request import Event, SamplingParams, TokenLogprob
from ostinato.runtime.tokenizer import Tokenizer
from tests.tokenizers import EOS, EOT, SYS, byte_level, sentencepiece

WORDS = {
    300: "ABC",
    301: "DEFG",
    302: "HI",
    310: "alpha",
    311: "beta",
    312: "gamma",
    313: "<tag>",
    314: "Obser",
    315: "vation",
}
STOP = "\n\nObservation: done"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_level(tmp_path_factory.mktemp("bytes"), WORDS))


def script(ids: Iterable[int], finish: str = "stop") -> list[Event]:
    """One event a token, the last of which ends the row."""
    listed = list(ids)
    return [
        Event(7, token_id, TokenLogprob(token_id, -float(i), ()), finish if i == len(listed) - 1 else None)
        for i, token_id in enumerate(listed)
    ]


def play(choice: ChoiceStream, events: Sequence[Event]) -> list[Delta | None]:
    return [choice.push(event) for event in events]


def text_of(deltas: Sequence[Delta | None]) -> str:
    return "".join(delta.text for delta in deltas if delta)


def ids_of(deltas: Sequence[Delta | None]) -> list[int]:
    return [token_id for delta in deltas if delta for token_id in delta.token_ids]


def test_characters_arrive_whole_and_the_end_token_has_no_text(tokenizer: Tokenizer) -> None:
    choice = ChoiceStream(tokenizer, list(b"x"), SamplingParams())
    deltas = play(choice, script([*"👩‍🔬🏽ď".encode(), EOS]))
    assert [delta.text for delta in deltas if delta] == [*"👩‍🔬🏽ď", ""]
    first = deltas[3]
    assert first is not None
    assert first.token_ids == tuple("👩".encode())
    assert deltas[:3] == [None, None, None]
    assert choice.finish_reason == "stop"
    assert choice.completion_tokens == 18
    assert not choice.wants_abort


def test_a_cut_inside_a_character_ends_in_one_mark(tokenizer: Tokenizer) -> None:
    choice = ChoiceStream(tokenizer, list(b"x"), SamplingParams(max_tokens=2, logprobs=1))
    nothing, last = play(choice, script([0xE2, 0x82], "length"))
    assert nothing is None
    assert last is not None
    assert (last.text, last.finish_reason, last.token_ids) == ("\N{REPLACEMENT CHARACTER}", "length", (0xE2, 0x82))
    assert [tokenizer.token_text(logprob.token_id).raw for logprob in last.logprobs] == [b"\xe2", b"\x82"]
    assert choice.completion_tokens == 2


def test_a_prompt_that_ends_inside_a_character_is_never_shown(tokenizer: Tokenizer) -> None:
    choice = ChoiceStream(tokenizer, [*b"SECRET ", 240, 159], SamplingParams())
    assert text_of(play(choice, script([0x98, 0x80, 0x21, EOS]))) == "😀!"


def test_the_prompt_decides_about_the_first_space(tmp_path: Path) -> None:
    pieces = Tokenizer(sentencepiece(tmp_path, ["▁lead", "▁x"]))
    for prompt, right in (([], "lead x"), ([1], "lead x"), ([260], " lead x")):
        assert text_of(play(ChoiceStream(pieces, prompt, SamplingParams()), script([259, 260, 2]))) == right


@pytest.mark.parametrize(
    ("stops", "include", "right"),
    [(("DE",), False, "ABC"), (("DE",), True, "ABCDE"), (("EF", "DEF"), False, "ABC")],
)
def test_a_stop_inside_a_token_cuts_and_asks_for_an_abort(
    tokenizer: Tokenizer, stops: tuple[str, ...], include: bool, right: str
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    choice = ChoiceStream(tokenizer, list(b"x"), params)
    events = script([300, 301, 302, EOS])
    deltas = play(choice, events[:2])
    assert text_of(deltas) == right
    assert ids_of(deltas) == [300, 301]
    assert choice.finish_reason == "stop"
    assert choice.wants_abort
    assert choice.completion_tokens == 2
    # What the engine still sends for that row says nothing more.
    late = [*events[2:], Event(7, None, None, "abort")]
    assert play(choice, late) == [None] * 3
    assert choice.completion_tokens == 2
    assert choice.finish_reason == "stop"


def test_a_stop_in_the_last_token_needs_no_abort(tokenizer: Tokenizer) -> None:
    choice = ChoiceStream(tokenizer, [], SamplingParams(stop=("DE",)))
    deltas = play(choice, script([300, 301], "length"))
    assert (text_of(deltas), choice.finish_reason, choice.wants_abort) == ("ABC", "stop", False)


def test_each_step_shows_its_own_text_unless_it_may_be_a_stop(tokenizer: Tokenizer) -> None:
    choice = ChoiceStream(tokenizer, [], SamplingParams(stop=(STOP,)))
    ids = [310, 32, 311, 32, 312, 313, 10, 10, 10, 314, 315, 302, EOS]
    deltas = play(choice, script(ids))
    assert [delta.text if delta else None for delta in deltas] == [
        "alpha", " ", "beta", " ", "gamma", "<tag>", None, None, "\n", None, None, "\n\nObservationHI", "",
    ]  # fmt: skip
    # A token comes with the delta that completes its text.
    assert [delta.token_ids if delta else None for delta in deltas][6:] == [
        None, None, (10,), None, None, (10, 10, 314, 315, 302), (EOS,),
    ]  # fmt: skip


def test_every_token_and_logprob_comes_once_and_in_order(tokenizer: Tokenizer) -> None:
    rng = random.Random(8)
    for _ in range(1000):
        ids = [rng.choice([*WORDS, SYS, 10, 0xE2, 0x82, 0xAC, 65]) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(stop=("CD", "aa", "I\n", "€"), logprobs=0, min_tokens=rng.randint(0, 3))
        choice = ChoiceStream(tokenizer, [], params)
        deltas = play(choice, script(ids, "length"))
        seen = ids_of(deltas)
        assert seen == ids[: choice.completion_tokens]
        logprobs = [logprob for delta in deltas if delta for logprob in delta.logprobs]
        assert [logprob.token_id for logprob in logprobs] == seen
        assert [logprob.logprob for logprob in logprobs] == [-float(i) for i in range(len(seen))]
        assert sum(delta.finish_reason is not None for delta in deltas if delta) == 1
        # No token is told before all its text is.
        shown, told = "", b""
        for delta in deltas:
            if delta and delta.finish_reason is None:
                shown += delta.text
                told += b"".join(tokenizer.token_bytes(i) for i in delta.token_ids if i != SYS)
                assert len(told.decode("utf-8", "replace")) <= len(shown)


@pytest.mark.parametrize(
    ("ids", "include", "skip", "right"),
    [
        ([72, 73, EOT], False, True, "HI"),
        ([72, 73, EOT], False, False, "HI"),
        ([72, 73, EOT], True, True, "HI"),
        ([72, 73, EOT], True, False, "HI<eot>"),
        ([72, SYS, 73, EOT], False, False, "H<sys>I"),
        ([72, SYS, 73, EOT], False, True, "HI"),
        ([72, 73, 302], False, True, "HI"),  # a stop id that is an ordinary word
        ([72, 73, 302], True, True, "HIHI"),
    ],
)
def test_the_stop_token_is_shown_only_on_request(
    tokenizer: Tokenizer, ids: list[int], include: bool, skip: bool, right: str
) -> None:
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
    choice = ChoiceStream(tokenizer, [], params)
    deltas = play(choice, script(ids))
    assert text_of(deltas) == right
    assert ids_of(deltas) == ids
    assert (choice.finish_reason, choice.completion_tokens) == ("stop", len(ids))


def test_held_text_is_shown_at_every_kind_of_end(tokenizer: Tokenizer) -> None:
    for finish in ("stop", "length", "abort"):
        choice = ChoiceStream(tokenizer, [], SamplingParams(stop=("ABCABC",)))
        last_id = EOS if finish == "stop" else 302
        deltas = play(choice, script([300, 65, last_id], finish))
        assert text_of(deltas) == ("ABCA" if finish == "stop" else "ABCAHI")
        assert choice.finish_reason == finish
    choice = ChoiceStream(tokenizer, [], SamplingParams(stop=("ABCABC",)))
    error = RequestError("no token is legal")
    first, last = play(choice, [*script([300, 300])[:1], Event(7, None, None, "error", error)])
    assert first is None
    assert last == Delta("ABC", (300,), (TokenLogprob(300, 0.0, ()),), "error", error)


def test_min_tokens_hides_stops_from_the_first_tokens(tokenizer: Tokenizer) -> None:
    ids = [300, 301, 302, 301, EOS]
    for min_tokens, right in ((0, "ABC"), (1, "ABC"), (2, "ABCDEFGHI"), (4, "ABCDEFGHIDEFG")):
        choice = ChoiceStream(tokenizer, [], SamplingParams(stop=("DE",), min_tokens=min_tokens))
        assert text_of(play(choice, script(ids))) == right


def test_a_stop_may_end_in_the_mark_of_an_unfinished_tail(tokenizer: Tokenizer) -> None:
    choice = ChoiceStream(tokenizer, [], SamplingParams(stop=("C\N{REPLACEMENT CHARACTER}",)))
    assert text_of(play(choice, script([300, 0xE2], "length"))) == "AB"
    assert choice.finish_reason == "stop"


def test_a_choice_without_tokens_and_what_its_first_event_carries(tokenizer: Tokenizer) -> None:
    choice = ChoiceStream(tokenizer, list(b"x"), SamplingParams(max_tokens=0, prompt_logprobs=0))
    prompt_logprobs = (None, TokenLogprob(120, -1.0, ()))
    delta = choice.push(Event(7, None, None, "length", num_cached=3, prompt_logprobs=prompt_logprobs))
    assert delta == Delta("", (), (), "length")
    assert (choice.completion_tokens, choice.num_cached, choice.prompt_logprobs) == (0, 3, prompt_logprobs)


def test_an_empty_stop_is_refused_with_the_request() -> None:
    for stop in (("",), ("ok", "")):
        with pytest.raises(RequestError) as caught:
            SamplingParams(stop=stop)
        assert caught.value.param == "stop"
    with pytest.raises(RequestError):
        SamplingParams(stop=("a", "b", "c", "d", "e"))
    assert SamplingParams(stop=("a",)).stop == ("a",)

"""Guides over a toy vocabulary: what is legal is what is accepted, and ends come where they may."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from ostinato.engines.errors import OstinatoError, RequestError
from ostinato.runtime.grammar_guide import Grammar
from ostinato.runtime.grammar_source import source_of
from ostinato.runtime.grammar_spec import GrammarSpec
from tests.grammar_bombs import GROWING, LONG_RUNS
from tests.grammars import (
    ENDS,
    PATIENT,
    VOCAB_SIZE,
    Bench,
    allowed,
    anything,
    bench,
    endings,
    follow,
    no_end,
    parsed,
    schema_spec,
)
from tests.tokenizers import EOS, EOT, SYS

A1 = {"const": {"a": 1}}
SPECS = {
    "const": schema_spec(A1),
    "pattern": schema_spec({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}),
    "object": schema_spec({"type": "object", "properties": {"ab": {"type": "boolean"}}, "required": ["ab"]}),
    "regex": GrammarSpec("regex", "a+(b|true)?"),
    "choice": GrammarSpec("choice", '["yes", "yellow", "é"]'),
    "lark": GrammarSpec("ebnf", 'start: "a" | "(" start ")"'),
    "gbnf": GrammarSpec("ebnf", 'root ::= "a" | "(" root ")"'),
}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("tokenizer")) as made:
        yield made


def _accepts(grammar: Grammar, history: list[int], token_id: int) -> bool:
    guide = grammar.start()
    for earlier in history:
        guide.accept(earlier)
    try:
        guide.accept(token_id)
    except OstinatoError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1,"b":"x"}', True),
        ('{"a":"x"}', False),
        (r'{"\u0061":"x"}', False),  # a once more, spelled in another way
        (r'{"b":"x","\u0061b":1}', False),
        ('{"b\\n":"x"}', True),
        ('{"n_1":1}', False),
        (r'{"\u006e_1":1}', False),
    ],
)
def test_a_listed_name_can_not_come_in_disguise(grammars: Bench, text: str, fits: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^n_": {"type": "null"}},
        "additionalProperties": {"type": "string"},
    }
    assert grammars.accepts(grammars.of_schema(schema), text) is fits


@pytest.mark.parametrize(
    ("day", "exists"),
    [
        ("2024-02-29", True), ("2023-02-29", False), ("2000-02-29", True), ("1900-02-29", False), ("2024-04-31", False),
        ("0000-01-01", False), ("0001-12-31", True), ("1996-02-29", True), ("2022-02-28", True), ("2024-02-30", False),
    ],
)  # fmt: skip
def test_dates_are_days_that_there_were(grammars: Bench, day: str, exists: bool) -> None:
    for name, text in (("date", day), ("date-time", f"{day}T10:20:30Z")):
        assert grammars.accepts(grammars.of_schema({"type": "string", "format": name}), f'"{text}"') is exists


@pytest.mark.parametrize("number", [2**53, -(2**53), 123456789012345, 0.1, 1e20, 1234567.12345678, 5e-7])
def test_numbers_that_are_let_through_are_kept_exactly(grammars: Bench, number: float) -> None:
    grammar = grammars.of_schema({"const": number})
    written = format(Decimal(repr(number)), "f")
    assert grammars.accepts(grammar, written)
    assert not grammars.accepts(grammar, written + ("1" if "." in written else ".1"))
    assert not grammars.accepts(grammar, written[:-1] + chr(ord(written[-1]) ^ 1))


@pytest.mark.parametrize("name", SPECS)
def test_every_id_is_legal_where_it_is_accepted_and_nowhere_else(grammars: Bench, name: str) -> None:
    grammar, rng = grammars.compile(SPECS[name]), random.Random(name)
    guide, history = grammar.start(), list[int]()
    while len(history) < 8:
        ids = allowed(guide)
        assert ids == {token_id for token_id in range(VOCAB_SIZE) if _accepts(grammar, history, token_id)}
        if not ids:  # after the end
            break
        history.append(anything(rng, ids))
        guide.accept(history[-1])
    assert history


@pytest.mark.parametrize("end", [EOS, EOT])
def test_an_end_token_comes_when_the_output_is_whole_and_each_of_them_may(grammars: Bench, end: int) -> None:
    guide = grammars.of_schema(A1).start()
    output: list[int] = []
    while not guide.has_ended:
        ids = allowed(guide)
        whole = grammars.text(output) == '{"a":1}'
        assert ids & ENDS == (ENDS if whole else set())
        assert not whole or ids == ENDS  # and then nothing else
        output.append(end if end in ids else max(ids))
        guide.accept(output[-1])
    assert parsed(grammars.text(output)) == {"a": 1}
    assert len(output) <= 16
    assert allowed(guide) == set()


def test_forced_tokens_are_the_masks_one_after_the_other(grammars: Bench) -> None:
    for name in SPECS:
        grammar, rng = grammars.compile(SPECS[name]), random.Random(name)
        jumping, plain = grammar.start(jumps=True), grammar.start()
        num_forced = 0
        while not plain.has_ended:
            assert plain.forced() == ()
            if forced := list(jumping.forced()):
                num_forced += len(forced)
                for token_id in forced:
                    assert allowed(plain) == allowed(jumping) == {token_id}
                    jumping.accept(token_id)
                    plain.accept(token_id)
                continue
            assert allowed(jumping) == allowed(plain)
            token_id = anything(rng, allowed(plain))
            jumping.accept(token_id)
            plain.accept(token_id)
        assert jumping.has_ended
        assert num_forced > 0 or name not in ("const", "object")
        assert num_forced == 0 or name not in ("lark", "gbnf")  # a caller's own rules are never looked ahead


@pytest.mark.parametrize("name", GROWING)
def test_rules_that_grow_with_the_output_are_refused_or_end_it_before_a_mask_takes_long(
    grammars: Bench, name: str
) -> None:
    """By what the compiler counts; the seconds have a wide margin: without the bounds there are masks of one second."""
    spec = replace(GROWING[name], param="structured_outputs")
    try:
        guide = grammars.compile(spec).start()
    except RequestError as error:
        assert (error.param, error.code) == ("structured_outputs", "unsupported_grammar")  # noqa: PT017
        assert "too much work" in str(error)  # noqa: PT017
        return
    rng, slowest = random.Random(name), 0.0
    try:
        for _ in range(400):
            began_at = time.thread_time()
            ids = allowed(guide)
            slowest = max(slowest, time.thread_time() - began_at)
            guide.accept(no_end(rng, ids))
    except RequestError as error:
        assert (error.param, error.code) == ("structured_outputs", "grammar_too_costly")  # noqa: PT017
    assert slowest < 0.25


@pytest.mark.parametrize("name", LONG_RUNS)
def test_a_long_text_is_not_tokenized_in_one_go(grammars: Bench, name: str) -> None:
    grammar = grammars.compile(LONG_RUNS[name])
    guide = grammar.start(jumps=True)
    guide.accept(ord("a" if name == "a regex" else "["))
    began_at = time.thread_time()
    for _ in range(50):
        assert guide.forced() == ()
        guide.accept(min(allowed(guide)))
    assert time.thread_time() - began_at < 0.5  # and 0.01 where it is all right, or minutes
    assert source_of(schema_spec({"const": "a" * 900}), PATIENT).head == ""  # what is short is jumped over


def test_a_place_where_nothing_is_legal_is_the_grammar_s_fault(grammars: Bench) -> None:
    grammar = grammars.compile(GrammarSpec("ebnf", "start: /[ab]{400}/ A\nA: /x/ & /y/", "structured_outputs"))
    with pytest.raises(RequestError) as refused:
        follow(grammar.start(), anything, random.Random(1), 500)
    assert (refused.value.param, refused.value.code) == ("structured_outputs", "no_legal_token")


def test_guides_of_one_grammar_do_not_share_their_place(grammars: Bench) -> None:
    grammar = grammars.of_schema(A1)
    rng = random.Random(3)
    outputs = [follow(grammar.start(), anything, rng) for _ in range(3)]
    assert {grammars.text(output or []) for output in outputs} == {'{"a":1}'}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (r'"a\n\"b\" "', True),
        ('"' + r"\n" * 12 + '"', True),  # an escape is one character
        ('"' + r"\n" * 13 + '"', False),
        ('"' + "é" * 12 + '"', True),
        ('"' + "😀" * 12 + '"', True),  # two UTF-16 units, one character
        ('"' + "😀" * 13 + '"', False),
        ('"\x01"', False),
        (r'"\u0041"', False),  # a second way to spell it
        (r'"\ud83d"', False),  # half a pair
        ('"a', False),
    ],
)
def test_strings_of_bounded_length_may_hold_escapes_and_nothing_raw(grammars: Bench, text: str, fits: bool) -> None:
    assert grammars.accepts(grammars.of_schema({"type": "string", "maxLength": 12}), text) is fits
    if fits:
        assert len(json.loads(text)) <= 12


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": "^[a-z]+$", "maxLength": 3}, ["a", "zzz"], ["", "zzzz", "A"]),
        ({"pattern": "^a*$", "minLength": 2}, ["aa", "aaaa"], ["a", "", "ab"]),
        ({"pattern": "b", "maxLength": 3}, ["b", "abc"], ["ac", "abcd"]),
        ({"format": "date", "minLength": 10}, ["2024-02-29"], ["2024-13-01", "2024"]),
        ({"pattern": '^[^"\\\\]*$'}, ["ab", "é\n"], ['"', "\\"]),
        ({"pattern": "^[[&]$"}, ["[", "&"], ["a"]),
        ({"pattern": r"^\d\D$"}, ["1a", "7é"], ["٣a", "1٣", "11"]),  # as ECMAScript and Python both read it
        ({"pattern": r"^[^\d\w]$"}, ["-", "€"], ["a", "é", "٣", "_"]),
        ({"pattern": r"^\W$"}, ["-", "€"], ["a", "é", "٣", "_"]),
        ({"pattern": r"^\s\S$"}, [" a", "\u2028é"], ["\ufeffa", " \ufeff", " \u00a0"]),
        ({"pattern": r"^[^\D]$"}, ["1"], ["٣", "a"]),
    ],
)
def test_rules_for_one_string_hold_together(
    grammars: Bench, schema: dict[str, object], good: list[str], bad: list[str]
) -> None:
    grammar = grammars.of_schema({"type": "string", **schema})
    assert [text for text in good if not grammars.accepts(grammar, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in bad if grammars.accepts(grammar, json.dumps(text, ensure_ascii=False))] == []


def test_integers_and_numbers_are_what_the_specification_calls_so(grammars: Bench) -> None:
    integer, number = grammars.of_schema({"type": "integer"}), grammars.of_schema({"type": "number"})
    assert [text for text in ("0", "-7", "10") if not grammars.accepts(integer, text)] == []
    assert [text for text in ("1.5", "01", "+1", "1.", ".5", "NaN") if grammars.accepts(integer, text)] == []
    assert [text for text in ("1.5", "-0.25", "1e3") if not grammars.accepts(number, text)] == []
    assert [text for text in ("01", "+1", "1.", ".5", "NaN", "Infinity") if grammars.accepts(number, text)] == []


def test_a_wider_vocabulary_than_the_tokenizers_is_masked(grammars: Bench) -> None:
    words = np.full(64, -1, np.int32)
    grammars.compile(GrammarSpec("regex", "[^a]*")).start().fill_mask(words)
    assert not words[-(-VOCAB_SIZE // 32) :].any()
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any()
    assert not bits[ord("a")]


def test_a_regex_is_of_the_whole_output_and_slashes_are_its_own(grammars: Bench) -> None:
    grammar = grammars.compile(GrammarSpec("regex", r"a/b\/[/c]+"))
    assert grammars.accepts(grammar, "a/b//c")
    assert not grammars.accepts(grammar, "a/b")
    assert not grammars.accepts(grammar, "xa/b/c")


def test_choices_are_taken_literally(grammars: Bench) -> None:
    texts = ["yes", 'a "quoted" \\ one', "é\n😀", "start: [x]*", "/re/", "ye", "\x7f\x00"]
    grammar = grammars.compile(GrammarSpec("choice", json.dumps(texts)))
    assert [text for text in texts if not grammars.accepts(grammar, text)] == []
    assert not grammars.accepts(grammar, "y")
    assert not grammars.accepts(grammar, "yesye")


@pytest.mark.parametrize(
    ("rules", "fits", "misfits"),
    [
        ('?start: sum\n?sum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/\n', "1+2", "1+"),
        ('x: "a" | "::= b"\nstart: x x\n', "a::= b", "ab"),
        ('root ::= item+ "."\nitem ::= [a-c]\n', "abc.", "abc"),
        ('  root::="x" | "start: y"', "start: y", "y"),
    ],
)
def test_rules_are_read_in_the_form_that_they_have(grammars: Bench, rules: str, fits: str, misfits: str) -> None:
    grammar = grammars.compile(GrammarSpec("ebnf", rules))
    assert grammars.accepts(grammar, fits)
    assert not grammars.accepts(grammar, misfits)


@pytest.mark.parametrize(
    "source",
    ['{"const": "a<eot>b"}', '{"enum": ["<sys>", "<sys>x"]}', '{"properties": {"<eot>": {}}, "required": ["<eot>"]}'],
)
def test_text_that_names_a_special_token_is_spelled(grammars: Bench, source: str) -> None:
    grammar = grammars.compile(GrammarSpec("json_schema", source))
    rng = random.Random(5)
    for jumps in (False, True):
        for _ in range(6):
            output = follow(grammar.start(jumps=jumps), endings, rng)
            if output is None:
                continue
            assert set(output[:-1]).isdisjoint({EOS, EOT, SYS})
            assert Draft202012Validator(json.loads(source)).is_valid(parsed(grammars.text(output)))

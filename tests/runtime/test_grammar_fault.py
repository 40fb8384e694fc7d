"""Refusals say what is wrong and where, and repeat nothing: neither the caller's text nor ours."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.grammar_spec import GrammarSpec, Kind
from tests.grammars import Bench, bench

CANARY = "CANARY"
OURS = ("llguidance", "no_forcing", "%json", "x-guidance", "whitespace", "REGEX", "start:", "verbose")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("tokenizer")) as made:
        yield made


def _schema(**schema: object) -> str:
    return json.dumps({"type": "object", "properties": {CANARY: schema}, "required": [CANARY]})


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("json_schema", _schema(type="string", format="iri"), "a format is not supported"),
        ("json_schema", _schema(enum=[]), "no value fits it"),
        ("json_schema", _schema(type=CANARY), "a type is none of JSON's"),
        ("json_schema", _schema(pattern=f"({CANARY}"), "a regex is not sound: unclosed group"),
        ("json_schema", _schema(type="integer", pattern=f"({CANARY}"), "a regex is not sound: unclosed group"),
        ("json_schema", _schema(patternProperties={f"({CANARY}": {}}), "a regex is not sound: unclosed group"),
        ("json_schema", json.dumps({"$defs": {"x": {"pattern": "("}}}), "a regex is not sound: unclosed group"),
        ("json_schema", _schema(pattern=rf"\b{CANARY}"), "a regex looks around"),
        ("json_schema", _schema(oneOf=[{"type": "number"}, {"type": "integer"}]), "oneOf is supported where"),
        ("json_schema", _schema(properties={"a": {}}, minProperties=1), "where all listed properties are required"),
        ("json_schema", _schema(patternProperties={"a": {}, f"{CANARY}|b": {}}), "one name fits two patternProperties"),
        ("regex", f"{CANARY}(", "a regex is not sound: unclosed group"),
        ("regex", f"{CANARY}(?=b)", "look-around, including look-ahead and look-behind, is not supported"),
        ("ebnf", f'start: "a" b\n\nb: {CANARY}', "at line 3, column 4: a name is not defined"),
        ("ebnf", f'start: "a"\n  ]]] "{CANARY}"', "at line 2, column 3: "),
        ("ebnf", f'start: "{CANARY}"\nstart: "b"', "at line 2, column 8: a rule is defined twice"),
        ("ebnf", f'{CANARY.lower()}: "a"', "it has no rule named start"),
        ("ebnf", f"start: A\nA: /{CANARY}(/", "at line 2, column 4: a regex is not sound: unclosed group"),
        ("ebnf", f"start: <|{CANARY}|>", "at line 1, column 8: the model has no such special token"),
        ("ebnf", f"root ::= {CANARY.lower()}", "a rule is not defined"),
        ("ebnf", f'root ::= "a" |\nfoo ::= [{CANARY}', "at line 2: something else was expected here"),
        ("lark", f'start: "{CANARY}" missing', "a name is not defined"),
    ],
)
def test_a_refusal_says_what_and_where_without_a_word_of_the_text(
    grammars: Bench, kind: Kind, source: str, said: str
) -> None:
    with pytest.raises(RequestError) as refused:
        grammars.compile(GrammarSpec(kind, source, "structured_outputs"))
    message = str(refused.value)
    assert said in message
    assert CANARY.lower() not in message.lower()
    assert not any(word in message for word in OURS)
    assert "\n" not in message
    assert refused.value.param == "structured_outputs"

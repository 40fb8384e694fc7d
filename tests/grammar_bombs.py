"""Grammars that would take for ever, swell, or nest without end; each is answered, one way or the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ostinato.runtime.grammar_spec import GrammarSpec
from tests.grammars import schema_spec

_FIELDS = {"regex": "regex", "ebnf": "grammar", "json_schema": "json"}
GROWING = {  # with each token of the output; unlike the others they are cheap to begin with
    "to the right": GrammarSpec("ebnf", "start: c start | c\nc: /(.|\\n)/"),
    "in two ways": GrammarSpec("ebnf", "start: e\ne: e e | /[a-z ]/"),
    "after a while": GrammarSpec("ebnf", "start: /[a-z]{64}/ rest\nrest: c rest | c\nc: /[a-z]/"),
    "lexer states": GrammarSpec("regex", r"((.|\n)*[aeiou](.|\n){13}[xyz]){3}(.|\n)*"),
}
# Behind a branch that no trial may take: one piece of text, tokenized at each of its tokens anew.
LONG_RUNS = {
    "a regex": GrammarSpec("regex", "[b-y]|(a|z)x{8000}"),
    "one text by reference": schema_spec(
        {
            "$defs": {"long": {"const": "abcdefgh" * 1000}},
            "anyOf": [{"type": "string"}, {"prefixItems": [{"$ref": "#/$defs/long"}] * 100, "minItems": 100}],
        }
    ),
}
DOUBLED = "".join(f"{{0}}{n}: {{0}}{n + 1} {{0}}{n + 1}\n" for n in range(40)) + '{0}40: "x"\n'
BOMBS = {  # each is answered, one way or the other
    **{
        regex: GrammarSpec("regex", regex)
        for regex in (
            *("(a+)+b", "(a|a)*c", "a{1000000}", "(?:a{1000}){1000}", ".{0,9999}x.{0,9999}", "(.*a){50}"),
            *("((a{0,100}){0,100}){0,100}", r"\p{L}{1,5000}", "(a|b)*a(a|b){300}", "(" * 2000 + "a" + ")" * 2000),
        )
    },
    **GROWING,
    **LONG_RUNS,
    "enum of 100,000": schema_spec({"enum": [f"s{n}" for n in range(100_000)]}),
    "enum of 5,000": schema_spec({"enum": [f"s{n}" for n in range(5_000)]}),
    "500 optional": schema_spec({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(500)}}),
    "5 MB": schema_spec({"const": "a" * 5_000_000}),
    "a large prime": schema_spec({"type": "integer", "multipleOf": 999_983}),
    "many patterns": schema_spec({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnop"]}),
    "many items": schema_spec({"type": "array", "minItems": 10**9, "items": {"const": "a"}}),
    "deep": GrammarSpec("json_schema", '{"anyOf":[' * 2000 + "{}" + "]}" * 2000),
    "doubled terminals": GrammarSpec("ebnf", "start: A0\n" + DOUBLED.format("A")),
    "doubled rules": GrammarSpec("ebnf", "start: r0\n" + DOUBLED.format("r")),
    "parentheses": GrammarSpec("ebnf", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "intersection": GrammarSpec("ebnf", r"start: A" "\n" r"A: /(.|\n)*(a|b){4000}(c|d){4000}/ & /.*x.{3000}/" "\n"),
}


def asked(spec: GrammarSpec) -> Mapping[str, Any]:
    """The field of a call that demands it."""
    return {"structured_outputs": {_FIELDS[spec.kind]: spec.source}}


def wave(first: int, count: int) -> Iterator[GrammarSpec]:
    """Bombs that nobody has thrown before, where each begins at another number: none is found among those kept."""
    for number in range(first, first + count):
        yield (
            schema_spec({"type": "integer", "multipleOf": 999_983 + 2 * number}),
            GrammarSpec("regex", rf"\p{{L}}{{1,{5000 - number}}}"),
            GrammarSpec("ebnf", "start: A0\n" + DOUBLED.format("A").replace("x", f"x{number}")),
            GrammarSpec("regex", f".{{0,{9999 - number}}}x.{{0,9999}}"),
        )[number % 4]

"""What the compiler says of a grammar, in our words: it repeats callers' texts, and ours (runs per refusal)."""

from __future__ import annotations

import re

from .grammar_source import Source

TOO_COSTLY = (
    "it takes too much work to find the tokens that may come next: use longer terminals, fewer ways to read the same "
    "text, and rules that repeat to the left"
)
_REGEX = re.compile(r"regex parse error:.*?\nerror: ([^\n]*)", re.DOTALL)  # whose reasons are fixed texts
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_LINE = re.compile(r" at line (\d+)")
_COSTLY = ("Too many items", "too many expressions", "too many states", "Current row has")
_REASONS = {  # what it says → what we say
    **dict.fromkeys(_COSTLY, TOO_COSTLY),
    "NoExtensionBias": "no text fits it",
    **dict.fromkeys(("Unsatisfiable schema", "unsatisfiable"), "no value fits it"),
    "min/maxProperties only": "minProperties and maxProperties are supported where all listed properties are required",
    "are not disjoint": "one name fits two patternProperties: let their patterns exclude each other",
    "with sibling keys": "a reference to itself stands beside other keywords",
    "too many digits": "a multipleOf has too many digits",
    "fuel": "it is too large or too intricate",
    "too large": "it is too large or too intricate",
    "too complex": "it is too large or too intricate",
    "Unknown format": "a format is not supported",
    "Invalid type": "a type is none of JSON's",
    "oneOf constraints": "oneOf is supported where a property tells its schemas apart, by a const or an enum",
    "unknown name": "a name is not defined",
    "duplicate rule": "a rule is defined twice",
    "duplicate token": "a terminal is defined twice",
    "circular reference": "a terminal refers to itself",
    "Unknown common regex": "there is no such common terminal to import",
    "unknown special token": "the model has no such special token",
    "no start rule found": "it has no rule named start",
    "range end must be": "a repeat ends before it begins",
    "lexer error": "a text stands here that is no part of a grammar",
    "Expected": "something else was expected here",
    "not found": "a rule is not defined",
    "lookarounds": r"a regex looks around, such as \b does, which is not supported",
    "invalid regex": "a regex is not supported",
    'parse "%json"': "a schema in it is not JSON",
}


def is_costly(message: str) -> bool:
    """Whether a grammar was given up because it outgrew its bounds."""
    return any(sign in message for sign in _COSTLY)


def told(message: str, source: Source) -> str:
    """Why a grammar can't be used and where in its own text, without a word of that."""
    if (found := _REGEX.search(message)) is not None:
        reason = f"a regex is not sound: {found[1]}"
    else:
        first = message.partition("\n")[0]
        reason = next((reason for sign, reason in _REASONS.items() if sign in first), "it can't be read")
    return f"{_place(message, source)}{reason}"


def _place(message: str, source: Source) -> str:
    if not source.is_callers:
        return ""
    if source.is_gbnf:  # what is compiled then is another text
        line = _LINE.search(message)
        return "" if line is None else f"at line {line[1]}: "
    place, num_lines = _PLACE.match(message), source.head.count("\n")
    return "" if place is None else f"at line {int(place[1]) - num_lines}, column {place[2]}: "

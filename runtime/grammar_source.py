"""A caller's spec as what the compiler takes, checked as far as that is possible without it (runs per request)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from ostinato.engines.errors import RequestError

from .grammar_demand import longest_demand, patterns
from .grammar_form import SPELLING, compilable
from .grammar_regex import shortest_text
from .grammar_schema import CODE, MAX_FORCED_CHARS, check_schema
from .grammar_spec import GrammarSpec, Kind
from .serve_limits import ServeLimits

_UNQUOTED = re.compile(r"\\.|/|\n", re.DOTALL)  # what ends a regex in Lark's form, and escapes, which do not
_QUOTED = {"/": r"\/", "\n": r"\n"}
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_OPTIONS = re.compile("%llguidance")
_TEMPERATURE = re.compile(r"^\s*[?!]*\w+\s*\[[^\]\n]*\btemperature\b", re.MULTILINE)
_UNFORCED = '%llguidance {"no_forcing": true}\n'  # finding what a caller's own rules force can take for ever
_MAX_RUN_CHARS = 1024  # what may be longer is not looked for, either


NAMES: Mapping[Kind, str] = {  # in messages
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regex",
    "choice": "choice",
    "lark": "form of tool calls",
    "ebnf": "grammar",
}


class Source(NamedTuple):
    """A grammar in Lark's form, or else in GBNF's; `head` goes before it. `is_callers`: who wrote it."""

    text: str
    head: str = ""
    is_gbnf: bool = False
    is_callers: bool = False
    patterns: tuple[str, ...] = ()  # of a schema, that must be sound though nothing be held to them


def source_of(spec: GrammarSpec, limits: ServeLimits) -> Source:
    """RequestError where the spec is too large, not of its kind's form, or asks for what is not served."""
    most = limits.max_regex_bytes if spec.kind == "regex" else limits.max_grammar_bytes
    if len(spec.source.encode()) > most:
        raise RequestError(
            f"the {NAMES[spec.kind]} exceeds {most} bytes: give a smaller one", param=spec.param, code=CODE
        )
    match spec.kind:
        case "json_object":
            return _made(_json({"type": "object"}))
        case "json_schema":
            schema = _schema(spec, limits)
            return _made(_json(schema))._replace(patterns=tuple(sorted(set(patterns(schema)))))
        case "regex":
            return _made(f"start: REGEX\nREGEX: {_regex(spec)}\n", shortest_text(spec.source))
        case "choice":
            return _made(_choice(spec), max(map(len, orjson.loads(spec.source))))
        case "lark":
            return _made(spec.source)
        case "ebnf":
            return _rules(spec)


def _made(rules: str, num_forced: int | None = None) -> Source:
    longest = longest_demand(rules) if num_forced is None else num_forced
    return Source(rules, _UNFORCED if longest > _MAX_RUN_CHARS else "")


def _json(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps({**schema, 'x-guidance': SPELLING})}\n"


def _schema(spec: GrammarSpec, limits: ServeLimits) -> dict[str, Any]:
    try:
        schema = orjson.loads(spec.source)
    except orjson.JSONDecodeError:
        raise RequestError("the JSON schema is not JSON", param=spec.param, code=CODE) from None
    check_schema(schema, spec.param, limits)
    return {} if schema is True else compilable(schema)


def _regex(spec: GrammarSpec) -> str:
    if not spec.source:
        raise RequestError("the regex is empty: give one", param=spec.param, code="unsupported_grammar")
    if shortest_text(spec.source) > MAX_FORCED_CHARS:
        raise RequestError(
            f"the regex demands a text of more than {MAX_FORCED_CHARS} characters: repeat less",
            param=spec.param,
            code="unsupported_grammar",
        )
    return "/" + _UNQUOTED.sub(lambda found: _QUOTED.get(found[0], found[0]), spec.source) + "/"


def _rules(spec: GrammarSpec) -> Source:
    for part, name in ((_OPTIONS, "%llguidance options are"), (_TEMPERATURE, "a temperature of a rule's own is")):
        if part.search(spec.source):
            raise RequestError(f"{name} not supported: leave it out", param=spec.param, code="unsupported_grammar")
    return Source(spec.source, _UNFORCED, is_gbnf=bool(_GBNF.search(spec.source)), is_callers=True)


def _choice(spec: GrammarSpec) -> str:
    try:
        choices = orjson.loads(spec.source)
    except orjson.JSONDecodeError:
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) for text in choices):
        raise RequestError("choice is not a list of one or more texts", param=spec.param, code="unsupported_grammar")
    if any(len(text) > MAX_FORCED_CHARS for text in choices):
        raise RequestError(
            f"a choice has more than {MAX_FORCED_CHARS} characters", param=spec.param, code="unsupported_grammar"
        )
    return "start: " + " | ".join(_literal(text) for text in choices) + "\n"


def _literal(text: str) -> str:
    """As Lark writes it, where no control character may stand raw."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")

"""A JSON schema that was checked, in the form that the compiler must have it in (made per request with one)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .grammar_regex import json_pattern
from .grammar_schema import ANY_TEXT, LISTS, NOTES, OF_ROOT, ONE, TABLES, Schema, target

# Outputs are JSON without blanks and without \u: so a value is spelled in one way, and most of what lies between values
# is forced. With \u the compiler would let a name that the schema lists pass for another one (\u0061 is a).
SPELLING: Mapping[str, Any] = {"whitespace_flexible": False, "json_allowed_escapes": '"\\bfnrt'}

# What the compiler leaves open: years of 366 days, and that the first one is 0001.
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_REAL_DATE = {"pattern": f"^(?:{_LEAP}-02-29|{_YEAR}-(?:0[13-9]|1[0-2]|02-[01]|02-2[0-8]))"}


def compilable(schema: Schema) -> dict[str, Any]:
    root = {name: value for name, value in schema.items() if name not in OF_ROOT}
    return _rewritten(root, root)


def _rewritten(schema: Schema, root: Schema) -> dict[str, Any]:
    made: dict[str, Any] = {}
    also: list[object] = []
    for name, value in schema.items():
        if name == "pattern":
            made[name] = json_pattern(value)
        elif name in ONE:
            made[name] = _inside(value, root)
        elif name == "oneOf" and (telling := _telling_name(value, root)):
            present = {"required": [telling]}
            also.append({"anyOf": [{"allOf": [_inside(inner, root), present]} for inner in value]})
        elif name in LISTS:
            made[name] = [_inside(inner, root) for inner in value]
        elif name in TABLES:
            rename = json_pattern if name == "patternProperties" else str
            made[name] = {rename(key): _inside(inner, root) for key, inner in value.items()}
        elif name not in NOTES and not (name == "uniqueItems" or (name == "format" and value in ANY_TEXT)):
            made[name] = value
    if made.get("format") in ("date", "date-time"):
        also.append(_REAL_DATE)
    if also:
        made["allOf"] = [*made.get("allOf", ()), *also]
    return made


def _inside(schema: object, root: Schema) -> object:
    return _rewritten(schema, root) if isinstance(schema, dict) else schema


def _telling_name(ways: Sequence[object], root: Schema) -> str | None:
    """A property by which a value tells which of these it is, so that it is one of them at most; the compiler does not
    follow references to find it.
    """
    tables: list[Mapping[str, frozenset[str]]] = []
    for way in ways:
        while isinstance(way, dict) and set(way) - set(NOTES) == {"$ref"}:
            way = target(way["$ref"], root)
        if not isinstance(way, dict) or way.get("type") != "object":
            return None
        tables.append({name: _texts_of(inner) for name, inner in way.get("properties", {}).items()})
    for name in tables[0]:
        texts = [table.get(name, frozenset()) for table in tables]
        if all(texts) and len(frozenset().union(*texts)) == sum(map(len, texts)):
            return name
    return None


def _texts_of(schema: object) -> frozenset[str]:
    """The texts that a value is one of; none where it may be anything else."""
    if not isinstance(schema, dict):
        return frozenset()
    values: list[Any] = schema.get("enum") or [schema.get("const")]
    return frozenset(values if all(isinstance(value, str) for value in values) else ())

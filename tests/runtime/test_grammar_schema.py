"""What is refused before anything is compiled: keywords by name, references, schemas without an end, long texts."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.grammar_form import compilable
from ostinato.runtime.grammar_regex import json_pattern, shortest_text
from ostinato.runtime.grammar_schema import check_schema
from ostinato.runtime.serve_limits import ServeLimits
from tests.schemas import FEATURES

_UNSERVED = (
    "if", "then", "else", "not", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired",
    "dependentSchemas", "dependencies", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "additionalItems",
    "nullable", "contentEncoding", "$anchor", "$dynamicRef", "$recursiveRef", "$vocabulary",
    "x-guidance", "strnig",
)  # fmt: skip


@pytest.mark.parametrize("keyword", _UNSERVED)
def test_a_keyword_that_would_be_ignored_is_refused_by_name_at_any_depth(keyword: str) -> None:
    for schema in ({keyword: True}, {"type": "array", "items": {"anyOf": [{"type": "null"}, {keyword: {}}]}}):
        with pytest.raises(RequestError, match=re.escape(repr(keyword))) as refused:
            check_schema(schema, "tools.0.function.parameters")
        assert (refused.value.param, refused.value.code) == ("tools.0.function.parameters", "unsupported_schema")


@pytest.mark.parametrize("name", FEATURES)
def test_each_claimed_feature_passes(name: str) -> None:
    check_schema(FEATURES[name], "p")


def test_what_every_reader_reads_alike_passes() -> None:
    for number in (1, 7, 10**6, 1.0, 0.5, 0.25):
        check_schema({"type": "number", "multipleOf": number}, "p")
    for regex in (r"^[0-9]+$", r"^x_", r"\\d", r"\.", r"[^a]"):
        check_schema({"patternProperties": {regex: {}}}, "p")
    with pytest.raises(RequestError, match=r"at /multipleOf: .* such as cents"):
        check_schema({"type": "number", "multipleOf": 0.01}, "p")


def test_a_property_may_have_any_name() -> None:
    names = {name: {"type": "null"} for name in (*_UNSERVED, "$ref", "pattern", "required")}
    check_schema({"type": "object", "properties": names}, "p")
    assert compilable({"properties": {"pattern": {"pattern": "[^a]"}}})["properties"]["pattern"] == {
        "pattern": r"[[^a]&&[^\x00]]"
    }


@pytest.mark.parametrize(
    "schema",
    [
        *([], None, "x", 5, False),
        {"type": "object", "properties": {"a": "str"}},
        {"type": "array", "items": [{}]},
        {"anyOf": []},
        {"allOf": {}},
        {"properties": []},
        {"minimum": "5"},
        {"exclusiveMinimum": True, "minimum": 3},
        {"minimum": 2**53 + 1},
        {"maximum": 0.1 + 0.2},
        {"enum": ["x", {"a": [12345678901234567]}]},
        {"uniqueItems": 0},
        {"maxLength": -1},
        {"minItems": 1.0},
        {"required": "a"},
        {"required": [1]},
        {"pattern": 5},
        {"pattern": "[]a]"},
        {"pattern": "[a--b]"},
        {"pattern": "(?x)a #"},
        {"type": "object", "required": ["a"], "minProperties": 3},
        {"type": "number", "exclusiveMinimum": 3, "maximum": 3.5},
        {"allOf": [{"exclusiveMaximum": 2}, {"minimum": 1.25}]},
        *({"type": "number", "multipleOf": number} for number in (0, -1, -0.5, 0.01, 0.1, 1.1, 2.5, 100.0, 1e-7)),
        *({"patternProperties": {regex: {}}} for regex in (r"\d", r"^x\W", r"[a\s]", r"\\\D")),
    ],
)
def test_what_is_no_schema_or_not_a_sound_one_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        check_schema(schema, "p")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": ""},
        {"$ref": "#/nope"},
        {"$ref": "#nope"},
        {"$ref": "http://example.com/x"},
        {"$ref": "other.json#/a"},
        {"$ref": 5},
        {"properties": {"a": {}}, "$ref": "#/properties"},
        {"default": {"type": "null"}, "$ref": "#/default"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"allOf": [{"type": "object"}, {"$ref": "#"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 2},
        {"anyOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}]},
    ],
)
def test_a_reference_that_leads_nowhere_out_or_round_in_circles_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        check_schema(schema, "p")


def test_schemas_that_recur_and_can_end_pass() -> None:
    check_schema({"type": "object", "properties": {"a": {"$ref": "#"}}}, "p")
    check_schema({"type": "array", "items": {"$ref": "#"}}, "p")
    check_schema({"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1}, "p")
    check_schema({"$id": "x", "$schema": "y", "properties": {"a/b": {}}, "items": {"$ref": "#/properties/a~1b"}}, "p")


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"anyOf": [schema]}
    return schema


def test_depth_and_lengths_have_their_limits() -> None:
    limits = ServeLimits(max_schema_depth=5, max_regex_bytes=10)
    check_schema(_nested(5), "p", limits)
    check_schema({"pattern": "a" * 10}, "p", limits)
    check_schema({"enum": ["a" * 8192], "minLength": 8192}, "p", limits)
    faulty: list[dict[str, Any]] = [
        _nested(6),
        {"pattern": "a" * 11},
        {"patternProperties": {"é" * 6: {}}},
        {"enum": ["x", {"a": ["a" * 8193]}]},
        {"minLength": 8193},
        {"pattern": "(a{99}){99}"},
    ]
    for schema in faulty:
        with pytest.raises(RequestError):
            check_schema(schema, "p", limits)
    with pytest.raises(RequestError):  # by a count, not by a stack that overflows
        check_schema(_nested(2000), "p")


@pytest.mark.parametrize(
    ("regex", "at_least"),
    [
        ("a{1000000}", 10**6),
        ("(?:a{1000}){1000}", 10**6),
        ("(?P<n>a{1000}){1000,}", 10**6),
        ("((a{10}){10}b){10}", 1010),
        (r"\x{41}{50}", 50),
        (r"[\]a]{50}", 50),
        (r"[^]a]{50}", 50),
        ("(?i)(?i:ab){50}", 100),
        ("(?x)( a #)(\n ){60}{60}", 3600),
    ],
)
def test_a_shortest_text_is_never_underestimated(regex: str, at_least: int) -> None:
    assert shortest_text(regex) >= at_least


def test_the_estimate_is_exact_where_there_is_no_choice_and_bounds_where_there_is() -> None:
    rng = random.Random(5)
    for _ in range(300):
        regex, length = _random_regex(rng, 3)
        assert shortest_text(regex) >= length
        assert re.fullmatch(regex, "a" * length) is not None
    assert shortest_text("ab(cd){3}e") == 9
    assert shortest_text(r"^\d{4}-\d{2}$") == 7


def _random_regex(rng: random.Random, depth: int) -> tuple[str, int]:
    """A regex over "a", and the length of its one text."""
    parts, total = [], 0
    for _ in range(rng.randint(1, 3)):
        atom, length = ("a", 1) if depth == 0 or rng.random() < 0.5 else _random_regex(rng, depth - 1)
        count = rng.randint(1, 5)
        parts.append(f"{atom}{{{count}}}" if atom == "a" else f"({atom}){{{count}}}")
        total += length * count
    return "".join(parts), total


@pytest.mark.parametrize(
    ("regex", "rewritten"),
    [
        ("a.b", "a.b"),
        ("[a-z]", r"[[a-z]&&[^\x00]]"),
        (r"[^\]\\]x[b]", r"[[^\]\\]&&[^\x00]]x[[b]&&[^\x00]]"),
        (r"\[a]", r"\[a]"),
        ("[[&~]", r"[[\[\&\~]&&[^\x00]]"),
        (r"\d\\d", r"[[0-9]&&[^\x00]]\\d"),
        (r"\D", r"[[[^\p{Nd}]]&&[^\x00]]"),
        (r"[^x\w]", r"[[^x\p{L}\p{N}_]&&[^\x00]]"),
        (r"[^\D]", r"[[^[^0-9]]&&[^\x00]]"),
    ],
)
def test_classes_of_a_pattern_are_written_anew(regex: str, rewritten: str) -> None:
    assert json_pattern(regex) == rewritten

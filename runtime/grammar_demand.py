"""How long a text a grammar may force in one piece: no more than the shortest value of some schema in it (per request).

What is forced is tokenized at each of its tokens anew, so a long piece would hold up the step that comes to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from .grammar_regex import shortest_text
from .grammar_schema import LISTS, ONE, TABLES, Schema, target

_JSON = "%json "
_MAX_ROUNDS = 8  # through references that follow each other
_FORMAT_CHARS, _NUMBER_CHARS = 64, 24  # more than the shortest of any format, of most numbers


def longest_demand(rules: str) -> float:
    """Characters, of all schemas in Lark's rules; infinite where that isn't found out soon."""
    most, at = 0.0, rules.find(_JSON)
    while at >= 0:
        schema, end = json.JSONDecoder().raw_decode(rules, at + len(_JSON))
        most = max(most, _Demand(schema).longest())
        at = rules.find(_JSON, end)
    return most


def patterns(root: Schema) -> Iterator[str]:
    """Every regex in a schema."""
    for node in _nodes(root):
        yield from ([node["pattern"]] if "pattern" in node else ())
        yield from node.get("patternProperties", ())


class _Demand:
    """The length of the shortest value of each schema, or a little more."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._nodes = list(_nodes(root))[::-1]  # inner ones first
        self._found = {id(node): math.inf for node in self._nodes}

    def longest(self) -> float:
        for _ in range(_MAX_ROUNDS):
            found = {id(node): self._shortest(node) for node in self._nodes}
            if found == self._found:
                return max(found.values())
            self._found = found
        return math.inf

    def _shortest(self, node: Schema) -> float:
        values = [*node.get("enum", ()), *([node["const"]] if "const" in node else ())]
        total: float = max((len(json.dumps(value)) for value in values), default=2)
        total += node.get("minLength", 0) + shortest_text(node.get("pattern", ""))
        total += _FORMAT_CHARS * ("format" in node) + _NUMBER_CHARS * ("multipleOf" in node)
        first = node.get("prefixItems", ())[: node.get("minItems", 0)]
        total += sum(1 + self._of(item) for item in first)
        if rest := node.get("minItems", 0) - len(first):
            total += rest * (1 + self._of(node.get("items")))
        properties, others = node.get("properties", {}), node.get("additionalProperties")
        required = set(node.get("required", ()))
        total += sum(len(json.dumps(name)) + 2 + self._of(properties.get(name, others)) for name in required)
        if node.get("minProperties", 0) > len(required):
            total += max((len(json.dumps(name)) + 2 + self._of(properties[name]) for name in properties), default=16)
        total += sum(self._of(part) for part in node.get("allOf", ()))
        if "$ref" in node:
            total += self._of(target(node["$ref"], self._root))
        for ways in ("anyOf", "oneOf"):
            if ways in node:
                total += min(self._of(way) for way in node[ways])
        return total

    def _of(self, schema: Any) -> float:
        return self._found.get(id(schema), math.inf) if isinstance(schema, dict) else 4


def _nodes(schema: Any) -> Iterator[Schema]:
    """Every schema in it that is an object, outer ones first."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name, value in schema.items():
        inner = value if name in LISTS else value.values() if name in TABLES else [value] if name in ONE else ()
        for each in inner:
            yield from _nodes(each)

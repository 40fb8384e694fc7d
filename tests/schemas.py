"""Random JSON schemas of what this server serves, and one of each feature (made per test)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]

# One a feature that is claimed; how each must be answered is in the tests.
FEATURES: Mapping[str, Schema] = {
    "any": {},
    "const": {"const": {"a": [1, "x", None]}},
    "enum": {"enum": ["a", 1, None, True, {"b": []}]},
    "types": {"type": ["string", "null"]},
    "integer": {"type": "integer", "minimum": -3, "maximum": 120},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9},
    "number": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]+$"},
    "loose pattern": {"type": "string", "pattern": "b.d", "maxLength": 8},
    "pattern and length": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
    "date": {"type": "string", "format": "date"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "time": {"type": "string", "format": "date-time"},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "x"}], "items": False, "minItems": 2},
    "object": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "names": {"type": "object", "patternProperties": {"^x_": {"type": "null"}}, "additionalProperties": False},
    "some": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "minProperties": 2},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    "oneOf": {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "ref": {"$defs": {"a": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2},
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "list": {
        "anyOf": [
            {"type": "null"},
            {
                "type": "object",
                "properties": {"rest": {"$ref": "#"}},
                "required": ["rest"],
                "additionalProperties": False,
            },
        ]
    },
    "notes": {
        "type": "boolean",
        "title": "t",
        "description": "d",
        "default": True,
        "$comment": "c",
        "example": False,
        "uniqueItems": False,
    },
    "any text": {"type": "string", "format": "password", "maxLength": 4},
    "told apart": {
        "$defs": {
            kind: {
                "type": "object",
                "properties": {"kind": {"const": kind}, value: {"type": "integer"}},
                "required": ["kind"],
                "additionalProperties": False,
            }
            for kind, value in (("cat", "lives"), ("dog", "age"))
        },
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}},
    },
}


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """Scalars, arrays, objects and unions, nested up to `depth`."""
    makers: list[Callable[[random.Random], Schema]] = [_string, _string, _integer, _number, _constant, _simple]
    if depth > 0:
        makers += [lambda rng: _array(rng, depth), lambda rng: _object(rng, depth), lambda rng: _object(rng, depth)]
        makers += [lambda rng: _union(rng, depth)]
    return rng.choice(makers)(rng)


def _simple(rng: random.Random) -> Schema:
    return {"type": rng.choice(["boolean", "null"])}


def _string(rng: random.Random) -> Schema:
    schema: Schema = {"type": "string"}
    if rng.random() < 0.5:
        schema["maxLength"] = rng.randint(0, 12)
    if rng.random() < 0.3:
        schema["minLength"] = rng.randint(0, 6)
    if rng.random() < 0.3:
        schema["pattern"] = rng.choice(["^[a-f]+$", "^a*$", r"\.[a-z]", "x|yz", "^(ab|c){1,3}$", '^[^"\\\\]*$', "é?"])
    elif rng.random() < 0.2:
        schema["format"] = rng.choice(["date", "ipv4", "ipv6", "uuid", "email", "time"])
    return schema


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-2000, 2000)
    schema: Schema = {"type": "integer"}
    if rng.random() < 0.6:
        schema["minimum"] = low
    if rng.random() < 0.6:
        schema["maximum"] = low + rng.randint(-2, 3000)
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.choice([2, 3, 10])
    return schema


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-40, 40) / 4
    schema: Schema = {"type": "number"}
    if rng.random() < 0.6:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(1, 40) / 8
    return schema


def _constant(rng: random.Random) -> Schema:
    values = ["", 'a"b\\c', "é😀\n", 0, -1, 1.5, True, None, [], {}, {"k": [1, {"z": "y"}]}]
    if rng.random() < 0.5:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": random_schema(rng, depth - 1)}
    if rng.random() < 0.7:
        schema["maxItems"] = rng.randint(1, 4)
    if rng.random() < 0.4:
        schema["minItems"] = rng.randint(0, 2)
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))]
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["a", "b", "id", "naïve", "with space", 'q"', "x_1"], rng.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}}
    if rng.random() < 0.7:
        schema["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice([False, False, random_schema(rng, 0)])
    if rng.random() < 0.1:
        schema["maxProperties"] = len(names) + 1
    return schema


def _union(rng: random.Random, depth: int) -> Schema:
    match rng.randrange(3):
        case 0:
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case 1:
            return {"oneOf": [{"type": "null"}, {"type": "integer", "minimum": 0}, {"type": "string", "maxLength": 3}]}
        case _:
            return {
                "$defs": {"it": random_schema(rng, depth - 1)},
                "type": "object",
                "properties": {"p": {"$ref": "#/$defs/it"}, "q": {"allOf": [{"$ref": "#/$defs/it"}]}},
                "required": ["p"],
                "additionalProperties": False,
            }

"""The depth of JSON and its objects against a parser that counts them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.json_depth import check_shape


def depth_of(value: Any) -> int:
    """By walking what was parsed."""
    if isinstance(value, dict):
        return 1 + max((depth_of(item) for item in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(item) for item in value), default=0)
    return 0


def num_objects_of(value: Any) -> int:
    """By walking what was parsed."""
    if isinstance(value, dict):
        return 1 + sum(map(num_objects_of, value.values()))
    return sum(map(num_objects_of, value)) if isinstance(value, list) else 0


def is_refused(raw: bytes, max_depth: int, max_objects: int = 2**40) -> bool:
    try:
        check_shape(raw, max_depth, max_objects)
    except RequestError as error:
        return error.code == "invalid_json"
    return False


def a_value(chance: random.Random, budget: int) -> Any:
    texts = ("", "[", "{", "]}", '"', "\\", '\\"', "[[[[[[", "\\\\", "é[", '"]"', "\n", "\u2028{")
    kind = chance.randrange(4) if budget else 3
    if kind == 0:
        return [a_value(chance, budget - 1) for _ in range(chance.randrange(4))]
    if kind == 1:
        return {chance.choice(texts) + str(i): a_value(chance, budget - 1) for i in range(chance.randrange(4))}
    return "".join(chance.choices(texts, k=chance.randrange(5))) if kind == 2 else chance.choice([1, None, True, -2.5])


def test_depth_is_what_a_parser_finds() -> None:
    chance = random.Random(7)
    for _ in range(3000):
        value = a_value(chance, 9)
        raw = json.dumps(value, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1])).encode()
        depth = depth_of(value)
        assert not is_refused(raw, depth)
        assert depth == 0 or is_refused(raw, depth - 1)
        num_objects = num_objects_of(value)
        assert not is_refused(raw, depth, num_objects)
        assert num_objects == 0 or is_refused(raw, depth, num_objects - 1)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":['])
def test_deep_ones_are_refused_whether_or_not_they_end(opening: bytes) -> None:
    per_part = opening.count(b"[") + opening.count(b"{")
    for depth in (64, 66):
        assert is_refused(opening * (depth // per_part), 64) == (depth // per_part * per_part > 64)
    for raw in (opening * 10_000, b'"\\"[[["' + opening * 100, opening * 2**20):
        assert is_refused(raw, 64)


def test_a_wide_one_is_not_deep() -> None:
    check_shape(b"[" + b"[]," * 2**20 + b"[]]", 2, 0)
    check_shape(json.dumps("[{" * 10_000).encode(), 0 + 1, 0)

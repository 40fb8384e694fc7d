"""`key=value` of a command line, written into what a TOML file gave (once per option)."""

from __future__ import annotations

import tomllib
from typing import Any

from .errors import RecipeError


def assign(table: dict[str, Any], assignment: str) -> None:
    """`limits.max_rows=8` reaches into a table; a value is TOML, or else a string. Raises RecipeError."""
    key, sign, text = assignment.partition("=")
    if not sign or not key:
        raise RecipeError(f"--set {assignment!r} has no value: write --set key=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *tables, last = key.split(".")
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise RecipeError(f"--set {key}: {name} is not a table")
    table[last] = value

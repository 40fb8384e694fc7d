"""serve.toml and options of the command line → ServeConfig, each key checked by name and by type (once at start)."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from ostinato.engines.errors import RecipeError

from .config import RuntimeConfig
from .serve_config import ServeConfig
from .serve_limits import ServeLimits

OFF = "off"  # None in a file, where None may stand
_TABLES: Mapping[str, type[Any]] = {"limits": ServeLimits, "engine": RuntimeConfig}
_FILES = ("bundle", "api_keys")


def read_serve_file(path: Path) -> dict[str, Any]:
    """The file's keys, unchecked. Files that it names are relative to it. Raises RecipeError."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise RecipeError(
            f"no configuration at {path} ({error.strerror}): give a TOML file, such as deploy/serve.toml"
        ) from None
    except ValueError as error:  # of TOML, or of UTF-8
        raise RecipeError(f"{path} is not TOML ({error}): correct it") from None
    for name in _FILES:
        if isinstance(table.get(name), str):
            table[name] = str(path.parent / table[name])
    return table


def serve_config(table: Mapping[str, Any]) -> ServeConfig:
    """Raises RecipeError for a key that is not known, of another type, or out of range."""
    plain = {name: value for name, value in table.items() if name not in _TABLES}
    config = _record(ServeConfig, plain, "", [field.name for field in fields(ServeConfig)])
    for name, kind in _TABLES.items():
        given = table.get(name, {})
        if not isinstance(given, dict):
            raise RecipeError(f"{name} is {given!r}: write a table [{name}]")
        known = [field.name for field in fields(kind)]
        config[name] = kind(**_record(kind, given, f"{name}.", known))
    return ServeConfig(**config)


def _record(kind: type[Any], table: Mapping[str, Any], prefix: str, known: Iterable[str]) -> dict[str, Any]:
    types = get_type_hints(kind)
    found = {}
    for name, value in table.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise RecipeError(f"unknown key {prefix}{name}: is {prefix}{near} meant?")
        found[name] = _value(types[name], value, prefix + name)
    return found


def _value(kind: Any, value: Any, name: str) -> Any:
    kinds = get_args(kind) or (kind,)
    if isinstance(value, str) and not value.isprintable():
        raise RecipeError(f"{name} is {value!r}: give it without such characters")
    may_be_off = NoneType in kinds and bool not in kinds  # where None is not false
    if may_be_off and value == OFF:
        return None
    wanted = tuple[str, ...] if str in kinds and Ellipsis in kinds else next(k for k in kinds if k is not NoneType)
    if wanted is Path and isinstance(value, str) and value:
        return Path(value)
    if wanted == tuple[str, ...] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if wanted is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if wanted in (int, bool, str) and type(value) is wanted:
        return value
    tells = {Path: "a file's name", float: "a number", int: "an integer", bool: "true or false", str: "a string"}
    off = f', or "{OFF}"' if may_be_off else ""
    raise RecipeError(f"{name} is {value!r}: give {tells.get(wanted, 'a list of strings')}{off}")

"""Files of a bundle that a stranger may have written: read within bounds, made into dataclasses by type (at start)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import BundleError, OstinatoError

MAX_BYTES = 64 * 2**20
_Record = TypeVar("_Record")


def bounded_text(path: Path) -> str:
    """The text of a JSON file of a bundle. Raises BundleError unless it is a plain UTF-8 file of at most 64 MiB."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise BundleError(f"{path} is larger than {MAX_BYTES // 2**20} MiB, no build writes that: build it again")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} can't be read ({error}): build the bundle again") from None


def json_table(text: str, where: Path) -> dict[str, Any]:
    """A JSON object. Raises BundleError for anything else, however broken, deep or long."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:  # broken; a number of 5,000 digits; 100,000 brackets
        raise BundleError(f"{where} is not JSON ({error}): build the bundle again") from None
    if not isinstance(table, dict):
        raise BundleError(f"{where} holds a {type(table).__name__}, wanted is an object: build the bundle again")
    return table


def record_from(kind: type[_Record], table: Any, where: Path) -> _Record:
    """The dataclass `kind` from its JSON form. Raises BundleError that names a field of another type, or none, or new.

    Knows what the contract's dataclasses are made of: str, int, float, bool, None, literals, unions, tuples, mappings
    from str, and dataclasses.
    """
    try:
        record: _Record = _value(kind, table, "")
        return record
    except (ValueError, RecursionError, OstinatoError) as error:  # the last from dataclasses that check their values
        raise BundleError(f"{where} does not read as a {_words(kind)} ({error}): build it again") from None


def _words(kind: type) -> str:
    """DecoderRecord → decoder record."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", kind.__name__).lower()


def _value(kind: Any, value: Any, at: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, at)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) == len(value):
            return tuple(_value(k, v, f"{at}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    elif origin is Mapping and isinstance(value, dict):
        return {_value(str, key, at): _value(arguments[1], item, f"{at}.{key}") for key, item in value.items()}
    elif origin is Literal and any(type(value) is type(one) and value == one for one in arguments):  # 4.0 is no 4
        return value
    elif origin in (Union, UnionType):
        return _one_of(arguments, value, at)
    elif kind is float and type(value) in (int, float):
        return float(value)
    elif kind is str and isinstance(value, str):
        value.encode()  # JSON can spell half a surrogate pair, which nothing can print
        return value
    elif kind in (int, bool, NoneType) and type(value) is kind:
        return value
    raise ValueError(f"{at.lstrip('.') or 'it'} is {_short(value)}, wanted {getattr(kind, '__name__', kind)}")


def _dataclass(kind: type[Any], value: Any, at: str) -> Any:
    kinds = _kinds(kind)
    if not isinstance(value, dict) or set(value) != set(kinds):
        odd = sorted(set(kinds) ^ set(value)) if isinstance(value, dict) else _short(value)
        raise ValueError(f"{at.lstrip('.') or 'it'} has other fields than {kind.__name__}: {odd}")
    return kind(**{name: _value(wanted, value[name], f"{at}.{name}") for name, wanted in kinds.items()})


def _one_of(kinds: tuple[Any, ...], value: Any, at: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    *first, last = (kind for kind in kinds if kind is not NoneType)
    for kind in first:
        try:
            return _value(kind, value, at)
        except ValueError:
            continue
    return _value(last, value, at)


def _kinds(kind: type[Any]) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Bytes of a body → a checked model, or a refusal that names the field at fault (lines run per request).

A body is a JSON object; of a name that comes twice the last counts, and null means unset. A field that nobody knows,
at any depth, is left out and told of in a header, or refused in strict mode. One that is known and not served here is
refused by name, unless it has a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ostinato.engines.errors import RequestError

from .request import RANGES
from .wire import KIND, MAX_FIELDS, MAX_NAME_CHARS, BodyT, WireModel, clipped
from .wire_unserved import LEFT_OUT

MAX_REPORTED_ERRORS = 3
MAX_PATH_PARTS = 8
MAX_IGNORED = 10_000  # fields in all
_JSON_INTEGERS = (-(2**63), 2**64 - 1)  # that are read as such: one beyond is a float


def parse_body(kind: type[BodyT], raw: bytes, ignored: list[str] | None = None, max_turns: int | None = None) -> BodyT:
    """RequestError names the field at fault and never repeats its value.

    Paths of fields that nobody knows go to `ignored`; without such a list they are refused. A conversation of more than
    `max_turns` is refused before its turns are looked at, which takes long.
    """
    try:
        table = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {clipped(str(error), 200)}", code="invalid_json") from None
    if not isinstance(table, dict):
        raise RequestError("the body is JSON but not an object: send {…}", code="invalid_json")
    for name in ("messages", "input"):
        turns = table.get(name)
        if max_turns is not None and isinstance(turns, list) and len(turns) > max_turns and name in kind.model_fields:
            raise RequestError(f"{name} has {len(turns)} entries, at most {max_turns} are allowed", param=name)
    if len(table) > MAX_FIELDS:
        raise RequestError(f"the body has {len(table)} fields, at most {MAX_FIELDS} are allowed: leave some out")
    known = kind.model_fields
    for name in [name for name in table if name not in known]:
        _leave_out(kind, (name,), table.pop(name), ignored)
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        if all(fault["type"] != "extra_forbidden" for fault in _faults(error)):
            raise _refusal(error) from None
    return _without_extras(kind, table, ignored)


def _without_extras(kind: type[BodyT], table: dict[str, Any], ignored: list[str] | None) -> BodyT:
    """The body less what its fields have too much: found by a second look, so that other bodies cost nothing."""
    try:
        for owner, path, value in _extras(kind.model_validate(table, extra="allow"), ()):
            _leave_out(owner, path, value, ignored)
        return kind.model_validate(table, extra="ignore")
    except ValidationError as error:
        raise _refusal(error) from None


def _extras(value: object, path: tuple[int | str, ...]) -> Iterator[tuple[type[WireModel], tuple[int | str, ...], Any]]:
    """(the model that has it, its path, its value) of every field too much."""
    if isinstance(value, list):
        for at, item in enumerate(value):
            yield from _extras(item, (*path, at))
    elif isinstance(value, WireModel):
        for name, extra in (value.model_extra or {}).items():
            yield type(value), (*path, name), extra
        for name, field in type(value).model_fields.items():
            yield from _extras(getattr(value, name), (*path, field.alias or name))


def _leave_out(kind: type[WireModel], path: tuple[int | str, ...], value: object, ignored: list[str] | None) -> None:
    """A field that `kind` lacks; RequestError where it asks for something, or is not to be left out."""
    name, shown = str(path[-1]), _path(path)
    entry = kind.unserved.get(name, LEFT_OUT if kind.is_closed else None)
    if entry is not None:
        if not entry.asks_for_nothing(value):
            advice = entry.advice(kind.model_fields.keys())
            raise RequestError(f"{shown} is not supported here: {advice}", param=shown, code="unsupported_parameter")
    elif ignored is None:
        raise RequestError(f"unknown field {shown!r}: leave it out", param=shown, code="unknown_parameter")
    elif len(ignored) >= MAX_IGNORED:
        raise RequestError(
            f"more than {MAX_IGNORED} fields are unknown: leave them out", param=shown, code="unknown_parameter"
        )
    else:
        ignored.append(shown)


_CODES = {
    "missing": "missing_required_parameter",
    **dict.fromkeys(
        (
            *("greater_than_equal", "less_than_equal", "too_long", "too_short", "string_too_long", "string_too_short"),
            *("literal_error", "string_pattern_mismatch", "finite_number"),
        ),
        "invalid_value",
    ),
}


def _faults(error: ValidationError) -> list[ErrorDetails]:
    return error.errors(include_url=False, include_context=False)


def _refusal(error: ValidationError) -> RequestError:
    """The first few faults by path; client text appears only as clipped key names."""
    faults = _faults(error)[:MAX_REPORTED_ERRORS]
    paths = [_path([part for part in fault["loc"] if not str(part).startswith(KIND)]) for fault in faults]
    message = "; ".join(f"{path}: {_complaint(path, fault)}" for path, fault in zip(paths, faults, strict=True))
    code = "invalid_value" if _is_beyond(faults[0]) else _CODES.get(faults[0]["type"], "invalid_type")
    return RequestError(message, param=paths[0], code=code)


def _is_beyond(fault: ErrorDetails) -> bool:
    given = fault["input"]
    return fault["type"] == "int_type" and isinstance(given, float) and abs(given) >= 2**63


def _complaint(path: str, fault: ErrorDetails) -> str:
    if _is_beyond(fault):
        low, high = RANGES.get(path, _JSON_INTEGERS)
        return f"out of range: give an integer from {low} to {high}"
    return fault["msg"].removeprefix("Value error, ")


def _path(parts: Sequence[int | str]) -> str:
    return ".".join(clipped(str(part), MAX_NAME_CHARS) for part in parts[:MAX_PATH_PARTS])

"""JSON objects as a model writes them: where one ends, and its members' own text (lines run per delta of a call)."""

from __future__ import annotations

import json
import re

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class ObjectEnd:
    """Finds the bracket that closes an object, in text that comes in pieces. It sees brackets and strings, no more."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False  # the next character is

    def find(self, text: str, start: int = 0) -> int:
        """The index past the closing bracket, or -1. Each call goes on where the text of the one before ended."""
        at = start
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._is_in_string else _OUTSIDE).search(text, at)
            if found is None:
                return -1
            at = found.end()
            if self._take(found.group()):
                return at
        return -1

    def _take(self, mark: str) -> bool:
        """Whether this was the last bracket."""
        if mark == "\\":
            self._is_escaped = True
        elif mark == '"':
            self._is_in_string = not self._is_in_string
        else:
            self._depth += 1 if mark in "{[" else -1
            return self._depth == 0
        return False


def members(text: str) -> dict[str, str] | None:
    """Each member's value by name, as it is written in `text`; None where `text` is no JSON object."""
    try:
        return _members(text)
    except (ValueError, RecursionError):  # also integers past Python's limit of digits
        return None


def _members(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    at = _skip(text, 0, "{")
    while text[at : at + 1] != "}":
        name, at = _DECODER.raw_decode(text, at)
        if not isinstance(name, str):
            raise ValueError("a name is no string")
        start = _skip(text, at, ":")
        _, end = _DECODER.raw_decode(text, start)
        found[name] = text[start:end]
        at = _skip(text, end, "")
        if text[at : at + 1] != "}":
            at = _skip(text, at, ",")
            if text[at : at + 1] == "}":
                raise ValueError("a comma before the end")
    if text[at + 1 :].strip():
        raise ValueError("more than an object")
    return found


def _skip(text: str, at: int, mark: str) -> int:
    """Past space, the mark, and space."""
    at = _past_space(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"no {mark!r}")
    return _past_space(text, at + len(mark))


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()

"""Tool calls in an output: text in, content and calls out, as they come (lines run per delta of a call with tools).

What comes out is the same however the text is cut. A call's arguments are the model's own text, character by
character, and begin only once its name is one that was offered. Text that looks like a call and is none is content
again; space around calls belongs to neither.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .stops import StopMatcher
from .tool_json import ObjectEnd, members
from .tool_style import ToolStyle

_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_NAME = re.compile(r'\s*\{\s*"([a-z]{1,16})"')
_BEGINNING = re.compile(r'\s*(?:\{\s*(?:\}|"[a-z]{0,16}\Z|\Z)|\Z)')
_NAMES = frozenset({"name", "arguments", "parameters", "type", "id", "function"})


class Content(NamedTuple):
    """Text outside of calls."""

    text: str


class CallStart(NamedTuple):
    """A call begins; they are numbered from 0."""

    call: int
    name: str


class Arguments(NamedTuple):
    """More of a call's arguments."""

    call: int
    text: str


Piece = Content | CallStart | Arguments


class ToolCallParser:
    """One choice's output. `is_forced`: it has nothing but calls, so that what is no call is one cut short, left out.

    `at_most_one`: what follows the first call is left out.
    """

    def __init__(self, style: ToolStyle, names: frozenset[str], *, is_forced: bool, at_most_one: bool) -> None:
        self._style = style
        self._names = names
        self._is_forced = is_forced
        self._at_most_one = at_most_one
        self.num_calls = 0
        self._pieces: list[Piece] = []
        self._text = ""  # not yet taken
        self._lead = ""  # what stood before a call that is not yet sure
        self._end = ObjectEnd()
        self._num_seen = 0  # of `_text`, by `_end`
        self._is_last = False
        self._state = self._outside if style.begin else self._prefix

    def push(self, text: str) -> list[Piece]:
        """What more text tells."""
        self._text += text
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """The rest, as no more text will come."""
        self._is_last = True
        return self.push("")

    @property
    def is_whole(self) -> bool:
        """Whether there was a call, and the last one's arguments came to their end."""
        return self.num_calls > 0 and self._state != self._arguments

    # A state takes text and says whether there is more to do now.

    def _outside(self) -> bool:
        """Content, up to the next marker and the space before it."""
        text, begin = self._text, self._style.begin
        at = text.find(begin)
        if at < 0:
            cut = len(text) if self._is_last else len(text) - _held(text, begin)
            self._say(text[:cut])
            self._text = text[cut:]
            return False
        start = len(text[:at].rstrip())
        self._say(text[:start])
        self._lead = text[start : at + len(begin)]
        self._text = text[at + len(begin) :]
        return self._turn_to_header()

    def _prefix(self) -> bool:
        """The mark that an output of calls may begin with."""
        text, prefix = self._text.lstrip(), self._style.prefix
        if not self._is_last and len(text) < len(prefix) and prefix.startswith(text):
            return False
        if text.startswith(prefix):
            cut = len(self._text) - len(text) + len(prefix)
            self._lead, self._text = self._text[:cut], self._text[cut:]
        return self._turn_to_header()

    def _turn_to_header(self) -> bool:
        self._end, self._num_seen = ObjectEnd(), 0
        self._state = self._header
        return True

    def _header(self) -> bool:
        """A call's name; or all of it, where its members come in another order."""
        text = self._text
        if found := _HEADER.match(text):
            return self._open(found.group(1), found.end())
        if not self._may_be_call():
            return self._give_back()
        again = text.find(self._style.begin) if self._style.begin else -1
        seen = text if again < 0 else text[:again]
        end = self._end.find(seen, self._num_seen)
        self._num_seen = len(seen)
        if end >= 0:
            return self._take_whole(end)
        if again >= 0 or self._is_last:
            return self._give_back()
        return False

    def _may_be_call(self) -> bool:
        first = _FIRST_NAME.match(self._text)
        return first.group(1) in _NAMES if first else bool(_BEGINNING.match(self._text))

    def _open(self, name: str, start: int) -> bool:
        if name not in self._names:
            return self._give_back()
        self._start(name)
        self._text = self._text[start:]
        self._end, self._num_seen = ObjectEnd(), 0
        self._state = self._arguments
        return True

    def _take_whole(self, end: int) -> bool:
        found = members(self._text[:end]) or {}
        name = found.get("name", "")[1:-1]
        arguments = found.get("arguments", found.get("parameters", "{}"))
        if name not in self._names or not arguments.startswith("{"):
            return self._give_back()
        self._start(name)
        self._pieces.append(Arguments(self.num_calls - 1, arguments))
        self._text = self._text[end:]
        self._state = self._marker
        return True

    def _give_back(self) -> bool:
        """What began as a call is content; the marker that it began with is none."""
        self._say(self._lead)
        self._lead = ""
        self._state = self._outside if self._style.begin else self._rest
        return True

    def _start(self, name: str) -> None:
        self._pieces.append(CallStart(self.num_calls, name))
        self.num_calls += 1
        self._lead = ""

    def _arguments(self) -> bool:
        end = self._end.find(self._text)
        cut = len(self._text) if end < 0 else end
        if cut:
            self._pieces.append(Arguments(self.num_calls - 1, self._text[:cut]))
        self._text = self._text[cut:]
        self._state = self._arguments if end < 0 else self._bracket
        return end >= 0

    def _bracket(self) -> bool:
        """The call's own bracket; members before it are left out, and so is nothing if it lacks."""
        text = self._text.lstrip()
        if not text:
            return False
        if text[0] == ",":
            self._end = ObjectEnd()
            self._end.find("{")
            self._state = self._more_members
            return True
        if text[0] == "}":
            self._text = text[1:]
        self._state = self._marker
        return True

    def _more_members(self) -> bool:
        end = self._end.find(self._text)
        self._text = "" if end < 0 else self._text[end:]
        self._state = self._more_members if end < 0 else self._marker
        return end >= 0

    def _marker(self) -> bool:
        """The marker at a call's end, if it has one."""
        text, end = self._text.lstrip(), self._style.end
        if not self._is_last and len(text) < len(end) and end.startswith(text):
            return False
        if end and text.startswith(end):
            self._text = text[len(end) :]
        self._state = self._nothing if self._at_most_one else self._gap
        return True

    def _gap(self) -> bool:
        """Between calls, or a call and what follows."""
        joint = self._style.joint.strip()
        text = self._text.lstrip()
        if joint and text.startswith(joint):
            text = text[len(joint) :].lstrip()
        if not text:
            return False
        if self._style.begin:
            self._text, self._state = text, self._outside
            return True
        self._lead, self._text = self._text[: len(self._text) - len(text)], text
        return self._turn_to_header()

    def _rest(self) -> bool:
        """Content to the end."""
        self._say(self._text)
        self._text = ""
        return False

    def _nothing(self) -> bool:
        self._text = ""
        return False

    def _say(self, text: str) -> None:
        if text and not self._is_forced:
            self._pieces.append(Content(text))


def _held(text: str, begin: str) -> int:
    """How much of the end of `text` may still belong to a call: space, then a beginning of its marker."""
    matcher = StopMatcher((begin,), False)
    shown, _ = matcher.push(text)
    return len(text) - len(shown.rstrip())

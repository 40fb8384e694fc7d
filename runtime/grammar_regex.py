"""A regex before it is compiled: how long its texts are, and its classes as JSON needs them (runs per request)."""

from __future__ import annotations

import math
import re

MAX_DIGITS = 9  # of a repeat's count: more than enough to be too long

_ATOM = re.compile(
    r"""\\[xuUpP]\{[^}]*\} | \\.                          # an escape
      | \[\^?\]?(?:\[:[^\]]*:\] | \\. | [^\]\\])*\]       # a class
      | \(\?[a-zA-Z-]*[:)] | \(\?P?<\w+> | \( | \)        # groups, flags
      | \{(\d+)(?:,\d*)?\} | .""",
    re.DOTALL | re.VERBOSE,
)
_REPEAT = re.compile(r"\{(\d+)")
_PART = re.compile(r"\\.|\[(\^?)((?:\\.|[^\]\\])*)(\]?)|.", re.DOTALL)  # a class, or anything else
_ATOMS = re.compile(r"\\.|.", re.DOTALL)
_MEMBER = re.compile(r"\\.|[\[&~]", re.DOTALL)
# Of \d \w \s and their opposites what ECMAScript and Python both mean, [0], and what either of them does, [1].
_SPACES = r" \t\n\x0B\x0C\r\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
_SHORT = {
    "d": ("0-9", r"\p{Nd}"),
    "w": ("0-9A-Za-z_", r"\p{L}\p{N}_"),
    "s": (_SPACES, _SPACES + r"\x1C-\x1F\x{85}\x{FEFF}"),
}
_SPACED = re.compile(r"\(\?[a-zA-Z-]*x")  # the flag for blanks and comments, in which anything may stand


def shortest_text(regex: str) -> int:
    """No fewer characters than its shortest text has: alternatives count as if all were needed.

    A regex that repeats a long text is one whose output the grammar forces for thousands of tokens on end.
    """
    if _SPACED.search(regex):
        return len(regex) * math.prod(_count(found[1]) for found in _REPEAT.finditer(regex))
    totals, last = [0], 0  # of each open group; of the atom just read
    for found in _ATOM.finditer(regex):
        atom = found[0]
        if found[1] is not None:
            totals[-1] += last * (_count(found[1]) - 1)
            last *= _count(found[1])
        elif atom == "(" or (atom.startswith("(?") and not atom.endswith(")")):
            totals.append(0)
            last = 0
        elif atom == ")":
            last = totals.pop() if len(totals) > 1 else 0
            totals[-1] += last
        elif atom not in {"*", "+", "?", "|", "^", "$"} and not atom.startswith("(?"):
            last = 1
            totals[-1] += last
    return sum(totals)


def _count(digits: str) -> int:
    return max(1, int(digits[:MAX_DIGITS]))


def is_read_alike(regex: str) -> bool:
    """Whether it has no class that ECMAScript and Python understand differently."""
    return not any(found[0][0] == "\\" and found[0][1].lower() in _SHORT for found in _ATOMS.finditer(regex))


def json_pattern(regex: str) -> str:
    """A pattern of a JSON schema with its classes written so that what fits them does so in ECMAScript and in Python.

    In its dialect [ && -- and ~~ mean something in a class. And it takes a class of every control character for one
    that has the quote and the backslash too, so none has U+0000. ValueError for what would be read otherwise still.
    """
    if _SPACED.search(regex):
        raise ValueError("the flag x is not supported")
    return _PART.sub(_part, regex)


def _part(found: re.Match[str]) -> str:
    negation, members, end = found.groups()
    if members is None:
        short = _short(found[0], 0)
        return found[0] if short == found[0] else rf"[[{short}]&&[^\x00]]"
    if not members or not end or "--" in members:
        raise ValueError("a class is empty, open, or has -- in it")
    members = _MEMBER.sub(lambda member: _member(member[0], 1 if negation else 0), members)
    return rf"[[{negation}{members}]&&[^\x00]]"


def _member(text: str, reach: int) -> str:
    return _short(text, reach) if len(text) > 1 else "\\" + text


def _short(escape: str, reach: int) -> str:
    """An escape as members of a class: what both mean by it, or with `reach` 1 what either does."""
    ranges = _SHORT.get(escape[-1].lower()) if len(escape) == 2 and escape[0] == "\\" else None
    if ranges is None:
        return escape
    return ranges[reach] if escape[-1].islower() else f"[^{ranges[1 - reach]}]"

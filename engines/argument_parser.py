"""Arguments of a sub-command: argparse, but what is wrong with them is one line (once per call)."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

_MISSING = "the following arguments are required: "  # argparse's words
_NUMBER = re.compile(r"-\.?\d")  # a value, such as -1


class ArgumentParser(argparse.ArgumentParser):
    """A wrong call ends with exit code 2 and says what was found, what is wanted and where to read on.

    Options are written out: a beginning that one option has today, two may have tomorrow.
    """

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Options that there are not come first: whatever else is wrong may follow from them."""
        given = list(sys.argv[1:] if args is None else args)
        for option in _options_in(given):
            if option not in self._option_string_actions and option[:2] not in self._option_string_actions:
                self.error(f"there is no option {option!r}{self._meant(option)}")
        found, left = super().parse_known_args(given, namespace)
        if left:
            self.error(f"{left[0]!r} is one argument too many")
        return found, left

    def error(self, message: str) -> NoReturn:
        """argparse would print the whole usage first."""
        if message.startswith(_MISSING):
            names = message.removeprefix(_MISSING).split(", ")
            message = f"{' and '.join(map(self._told, names))} {'is' if len(names) == 1 else 'are'} missing"
        if message.endswith("expected one argument"):
            message += ", and one that begins with - as in --option=-value"
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` shows all)\n")

    def _meant(self, option: str) -> str:
        """Options that begin so, or else the one that is spelt most alike."""
        known = list(self._option_string_actions)
        near = [name for name in known if name.startswith(option)] or get_close_matches(option, known, 1)
        return f": did you mean {' or '.join(near)}?" if near else ""

    def _told(self, name: str) -> str:
        """The argument with what its help says of it."""
        helps = (action.help for action in self._actions if name in (action.metavar, action.dest))
        told = next(helps, None)
        return name if told is None else f"{name}, {told},"


def _options_in(given: Iterable[str]) -> Iterable[str]:
    """Names of what argparse takes for options: a text with a blank or a number is a value, and so is all after --."""
    for text in given:
        if text == "--":
            return
        if text.startswith("-") and text != "-" and " " not in text and not _NUMBER.match(text):
            yield text.partition("=")[0]

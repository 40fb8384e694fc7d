"""Arguments of a sub-command: argparse, but what is wrong with them is one line (once per call)."""

from __future__ import annotations

import argparse
from typing import NoReturn

_MISSING = "the following arguments are required: "  # argparse's words


class ArgumentParser(argparse.ArgumentParser):
    """A wrong call ends with exit code 2 and says what was found, what is wanted and where to read on."""

    def error(self, message: str) -> NoReturn:
        """argparse would print the whole usage first."""
        if message.startswith(_MISSING):
            names = message.removeprefix(_MISSING).split(", ")
            message = f"{' and '.join(map(self._told, names))} {'is' if len(names) == 1 else 'are'} missing"
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` shows all)\n")

    def _told(self, name: str) -> str:
        """The argument with what its help says of it."""
        helps = (action.help for action in self._actions if name in (action.metavar, action.dest))
        told = next(helps, None)
        return name if told is None else f"{name}, {told},"

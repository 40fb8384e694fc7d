"""The `ostinato` command: a dispatcher that imports only the sub-command asked for (once per call)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.metadata import entry_points, version

from .errors import OstinatoError

GROUP = "ostinato.commands"
_INTERRUPTED, _PIPE_CLOSED = 128 + 2, 128 + 13  # as shells tell of SIGINT and SIGPIPE
_TELLS = {
    "build": "make a bundle from a recipe",
    "verify": "compare a bundle with transformers",
    "inspect": "show what is in a bundle",
    "diff": "show what two bundles differ in",
    "plan": "say whether a recipe fits a GPU, and how fast a step can be",
    "kernels": "compile the GPU kernels, and show what each takes",
    "generate": "complete prompts",
    "chat": "talk to a bundle in the terminal",
    "serve": "serve a bundle over the OpenAI API",
    "diagnose": "say which hand-off of a running server stalls",
}


def main(argv: list[str] | None = None) -> int:
    """Run `ostinato COMMAND …`: 0 when all is well, 1 for what failed or differs, 2 for a refusal."""
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read us, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return _PIPE_CLOSED
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # rich makes a 1 of it
            return _PIPE_CLOSED
        raise
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(argv: list[str]) -> int:
    commands = {point.name: point for point in entry_points(group=GROUP)}
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(commands), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"ostinato {version('ostinato')}")
        return 0
    if argv[0] not in commands:
        near = get_close_matches(argv[0], commands, 1)
        told = f"did you mean {near[0]}?" if near else f"give one of {', '.join(_ordered(commands))}"
        print(
            f"ostinato: there is no command {argv[0]!r}: {told} (`ostinato --help` says what each does)",
            file=sys.stderr,
        )
        return 2
    try:
        return int(commands[argv[0]].load()(argv[1:]))
    except ModuleNotFoundError as error:
        print(
            f"ostinato {argv[0]} needs {error.name}: install the matching extra, ostinato[cpu] or ostinato[build]",
            file=sys.stderr,
        )
    except OstinatoError as error:
        print(f"ostinato {argv[0]}: {error}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except OSError as error:  # of a file or folder that nobody on the way had more to say about
        if error.filename is None:
            raise
        print(
            f"ostinato {argv[0]}: {error.filename}: {error.strerror}: see that it is there and may be used",
            file=sys.stderr,
        )
    return 2


def _usage(commands: Iterable[str]) -> str:
    lines = [f"  {name:10}{_TELLS.get(name, '')}".rstrip() for name in _ordered(commands)]
    end = "ostinato COMMAND --help tells more. Exit codes: 0 fine, 1 failed or a difference found, 2 refused."
    return "\n".join(["usage: ostinato COMMAND …", "", *lines, "", end])


def _ordered(commands: Iterable[str]) -> list[str]:
    """In the order in which one meets them, then those that others have added."""
    return [*(name for name in _TELLS if name in commands), *sorted(set(commands) - _TELLS.keys())]

"""The `ostinato` command: a dispatcher that imports only the sub-command asked for (once per call)."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from .errors import OstinatoError

GROUP = "ostinato.commands"


def main(argv: list[str] | None = None) -> int:
    """Run `ostinato COMMAND …`; exit 0 on success, 1 on a failed check, 2 on a refusal."""
    argv = sys.argv[1:] if argv is None else argv
    commands = {point.name: point for point in entry_points(group=GROUP)}
    if not argv or argv[0] not in commands:
        asked_for_help = bool(argv) and argv[0] in ("-h", "--help")
        print(f"usage: ostinato {{{','.join(sorted(commands))}}} …", file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else 2
    try:
        return int(commands[argv[0]].load()(argv[1:]))
    except ModuleNotFoundError as error:
        print(
            f"ostinato {argv[0]} needs {error.name}: install the matching extra, ostinato[cpu] or ostinato[build]",
            file=sys.stderr,
        )
    except OstinatoError as error:
        print(f"ostinato {argv[0]}: {error}", file=sys.stderr)
    except OSError as error:  # of a file or folder that nobody on the way had more to say about
        if error.filename is None:
            raise
        print(
            f"ostinato {argv[0]}: {error.filename}: {error.strerror}: see that it is there and may be used",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        return 130
    return 2

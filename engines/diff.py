"""`ostinato diff`: what differs between two bundles, and whether the caller forbids such a thing (once per call)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .argument_parser import ArgumentParser
from .bundle import open_bundle
from .diff_report import difference_lines, differences_json
from .difference import Difference, differences_of
from .errors import RecipeError
from .facts import KINDS


def diff(argv: list[str]) -> int:
    """`ostinato diff A B [--fail-on KIND[:PERCENT%],…] [--json]`; 1 on a difference of a kind that --fail-on names."""
    parser = ArgumentParser(
        prog="ostinato diff", description="Check every file of two bundles, and show what they differ in."
    )
    parser.add_argument("first", type=Path, metavar="A", help="a bundle's folder")
    parser.add_argument("second", type=Path, metavar="B", help="another's")
    parser.add_argument(
        "--fail-on",
        default="",
        metavar="KINDS",
        help=f"exit 1 on differences of these kinds, separated by commas (default: none): {', '.join(KINDS)}. "
        "latency:5%% forgives numbers that shrink, or grow by at most 5 percent",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args(argv)
    limits = fail_limits(arguments.fail_on)
    bundles = [open_bundle(path, any_machine=True) for path in (arguments.first, arguments.second)]
    differences = differences_of(*bundles)
    failed = [difference for difference in differences if fails(difference, limits)]
    told = differences_json if arguments.json else difference_lines
    print(told(bundles, differences, failed), end="")
    return 1 if failed else 0


def fail_limits(text: str) -> Mapping[str, float | None]:
    """ "graph,latency:5%" → {"graph": None, "latency": 5.0}. Raises RecipeError for what it does not know."""
    limits: dict[str, float | None] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, colon, percent = part.partition(":")
        if kind not in KINDS:
            raise RecipeError(f"--fail-on names {kind!r}: give some of {', '.join(KINDS)}")
        if kind in limits:
            raise RecipeError(f"--fail-on names {kind} more than once: name each once")
        number = percent.removesuffix("%")
        if colon and not (number.replace(".", "", 1).isdecimal() and number.isascii()):
            raise RecipeError(f"--fail-on {part}: {percent!r} is no percentage; write {kind}:5%")
        limits[kind] = float(number) if colon else None
    return limits


def fails(difference: Difference, limits: Mapping[str, float | None]) -> bool:
    """Without a limit any difference of the kind fails; with one, numbers may shrink, or grow up to it."""
    if difference.kind not in limits:
        return False
    limit = limits[difference.kind]
    return limit is None or difference.growth is None or difference.growth > limit

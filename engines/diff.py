"""`ostinato diff`: what differs between two bundles, and whether the caller forbids such a thing (once per call)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .argument_parser import ArgumentParser
from .bundle import Bundle, open_bundle
from .errors import RecipeError
from .facts import KINDS, Fact, bundle_facts
from .natural_order import natural_order

_WIDTH = 48  # of a value in the table; --json has it whole


@dataclass(frozen=True)
class Difference:
    """One fact that is not the same; None where a bundle has no such fact.

    `growth`: from the first to the second, in percent of the first; None unless both are numbers.
    """

    kind: str
    what: str
    first: Fact | None
    second: Fact | None
    growth: float | None


def diff(argv: list[str]) -> int:
    """`ostinato diff A B [--fail-on KIND[:PERCENT%],…] [--json]`; 1 on a difference of a kind that --fail-on names."""
    parser = ArgumentParser(prog="ostinato diff", description="Compare two bundles; checks every file.")
    parser.add_argument("first", type=Path, metavar="A", help="a bundle's folder")
    parser.add_argument("second", type=Path, metavar="B", help="another's")
    parser.add_argument(
        "--fail-on",
        default="",
        metavar="KINDS",
        help=f"exit 1 on such differences: {', '.join(KINDS)}. latency:5%% forgives numbers that shrink, or grow by at "
        "most 5 percent",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    limits = fail_limits(arguments.fail_on)
    bundles = [open_bundle(path, any_machine=True) for path in (arguments.first, arguments.second)]
    differences = differences_of(*bundles)
    failed = [difference for difference in differences if fails(difference, limits)]
    print(_json(bundles, differences, failed) if arguments.json else _table(differences, failed), end="")
    return 1 if failed else 0


def differences_of(first: Bundle, second: Bundle) -> list[Difference]:
    """Every fact that differs, by kind and name. Raises BundleError if a rank's program does not read."""
    facts = bundle_facts(first), bundle_facts(second)
    found = []
    for kind in KINDS:
        a, b = (table[kind] for table in facts)
        for what in sorted({*a, *b}, key=natural_order):
            values = a.get(what), b.get(what)
            if values[0] != values[1]:
                found.append(Difference(kind, what, *values, _growth(*values)))
    return found


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


def _growth(first: Fact | None, second: Fact | None) -> float | None:
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return None
    if first == 0:
        return math.copysign(math.inf, second)
    return round(100 * (second - first) / abs(first), 9)  # so that 1.25 to 1.3 is 4 percent, and no hair more


def _table(differences: Sequence[Difference], failed: Sequence[Difference]) -> str:
    if not differences:
        return "no difference\n"
    header = ("", "kind", "what", "A", "B", "change")
    rows = [header] + [
        ("!" if d in failed else "", d.kind, d.what, _show(d.first), _show(d.second), _change(d.growth))
        for d in differences
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    verdict = f"{len(differences)} differences" + (f", {len(failed)} that --fail-on forbids (!)" if failed else "")
    return "\n".join([*lines, verdict]) + "\n"


def _json(bundles: Sequence[Bundle], differences: Sequence[Difference], failed: Sequence[Difference]) -> str:
    """Growth from 0 is null there, as JSON has no infinity."""
    tables = [
        {
            **asdict(difference),
            "growth": difference.growth if difference.growth is None or math.isfinite(difference.growth) else None,
            "fails": difference in failed,
        }
        for difference in differences
    ]
    names = {key: str(bundle.path) for key, bundle in zip(("first", "second"), bundles, strict=True)}
    return json.dumps({**names, "differences": tables, "failed": bool(failed)}, indent=1) + "\n"


def _show(value: Fact | None) -> str:
    if value is None:
        return "–"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def _change(growth: float | None) -> str:
    if growth is None:
        return ""
    return f"{growth:+.1f}%" if math.isfinite(growth) else "from nothing"

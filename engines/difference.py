"""What two bundles differ in, fact by fact (once per call)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .bundle import Bundle
from .facts import KINDS, Fact, bundle_facts
from .natural_order import natural_order


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


def _growth(first: Fact | None, second: Fact | None) -> float | None:
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return None
    if first == 0:
        return math.copysign(math.inf, second)
    return round(100 * (second - first) / abs(first), 9)  # so that 1.25 to 1.3 is 4 percent, and no hair more

"""What `ostinato diff` prints: a line a difference, by kind; or all of them as JSON (once per call)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

from .bundle import Bundle
from .difference import Difference
from .facts import Fact

_DIGEST = re.compile("[0-9a-f]{64}")
_DIGITS = 12  # of a digest; --json has it whole
_MAX_WHAT = 52  # longer names push their values to the right


def difference_lines(bundles: Sequence[Bundle], differences: Sequence[Difference], failed: Sequence[Difference]) -> str:
    """`what  A → B`, with `!` before what the caller forbids."""
    if not differences:
        return "no difference\n"
    lines = [f"{name}  {bundle.path}" for name, bundle in zip("AB", bundles, strict=True)]
    for kind, group in groupby(differences, key=lambda difference: difference.kind):
        lines += ["", kind, *_group_lines(list(group), failed)]
    verdict = f", {len(failed)} that --fail-on forbids (!)" if failed else ""
    lines += ["", f"{len(differences)} difference{'s' * (len(differences) > 1)}{verdict}"]
    return "\n".join(lines) + "\n"


def differences_json(bundles: Sequence[Bundle], differences: Sequence[Difference], failed: Sequence[Difference]) -> str:
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


def _group_lines(group: Sequence[Difference], failed: Sequence[Difference]) -> Iterator[str]:
    width = min(_MAX_WHAT, max(len(difference.what) for difference in group))
    for difference in group:
        mark = "!" if difference in failed else " "
        if difference.kind == "notes":  # the note itself is the name
            yield f"{mark} only in {'A' if difference.second is None else 'B'}: {difference.what}"
        else:
            values = f"{_show(difference.first)} → {_show(difference.second)}"
            yield f"{mark} {difference.what:<{width}}  {values}{_change(difference.growth)}"


def _show(value: Fact | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return value[:_DIGITS] if _DIGEST.fullmatch(value) else value or "nothing"


def _change(growth: float | None) -> str:
    return f"  {growth:+.1f}%" if growth is not None and math.isfinite(growth) else ""

"""`ostinato diagnose URL`: reads a server's last calls and says which hand-off stalls (one run of the command)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException

from rich.console import Console
from rich.table import Table

from ostinato.engines.argument_parser import ArgumentParser
from ostinato.engines.errors import OstinatoError

from .recent import NUM_CALLS
from .stalls import GROUPS, Verdict, judge

_SECONDS = 10.0
_MAX_BYTES = 64 * 2**20


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A server that sends us elsewhere would get our key sent there."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def diagnose(argv: list[str]) -> int:
    """`ostinato diagnose`: which hand-off stalls, and what to change."""
    parser = ArgumentParser(
        prog="ostinato diagnose", description="Say which hand-off of a running server stalls, and what to change."
    )
    parser.add_argument("url", metavar="URL", help="the server's metrics port, such as http://127.0.0.1:8001")
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object")
    parser.add_argument("--key", help="an API key, where the metrics port asks for one")
    parser.add_argument(
        "-n", type=int, default=NUM_CALLS, metavar="CALLS", help=f"judge the last so many calls (default: {NUM_CALLS})"
    )
    args = parser.parse_args(argv)
    verdict = judge(read_calls(args.url, args.n, args.key))
    if args.json:
        print(json.dumps(verdict._asdict()))
    else:
        _print(verdict)
    return 0


def read_calls(url: str, count: int, key: str | None = None) -> list[Mapping[str, float]]:
    """Milliseconds by span of the last calls that asked the model; OstinatoError where the server does not tell."""
    if not (url.startswith(("http://", "https://")) and url.isprintable()):
        raise OstinatoError(f"{url!r} is no http address: give the metrics port's, such as http://127.0.0.1:8001")
    if not 1 <= count <= NUM_CALLS:
        raise OstinatoError(f"-n is {count}: give 1 to {NUM_CALLS}")
    if not ((key or "x").isascii() and (key or "x").isprintable()):
        raise OstinatoError("the key has characters that no key has: give it as it stands in the server's file")
    try:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(url.rstrip("/") + f"/debug/requests?n={count}", headers=headers)
        with _OPENER.open(request, timeout=_SECONDS) as response:
            table = json.loads(response.read(_MAX_BYTES))
        return [{**call["spans_ms"]} for call in table["requests"] if call["choices"]]
    except urllib.error.HTTPError as error:
        raise OstinatoError(_told(url, error)) from None
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        cause = getattr(error, "reason", error)  # a URLError only wraps what happened
        raise OstinatoError(
            f"no server of ours answers at {url} ({getattr(cause, 'strerror', None) or cause}): give its metrics port "
            "(--metrics-port, 8001 by default)"
        ) from None


def _told(url: str, error: urllib.error.HTTPError) -> str:
    hints = {401: "give --key", 404: "that may be the API port: give the metrics port", 503: "the model is loading"}
    return f"{url} answered {error.code}: {hints.get(error.code, 'see its log')}"


def _print(verdict: Verdict) -> None:
    console = Console()
    console.print(verdict.sentence, highlight=False)
    if not verdict.num_calls:
        return
    table = Table(title=f"{verdict.num_calls} calls, {verdict.mean_ms:.1f} ms each", title_justify="left")
    for name, justify in (("hand-off", "left"), ("share", "right"), ("ms a call", "right"), ("spans", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for group in GROUPS:
        parts = {name: verdict.mean_ms_by_span.get(name, 0.0) for name in group.spans}
        shown = ", ".join(f"{name} {value:.2f}" for name, value in parts.items() if value >= 0.005)
        style = "bold" if group.name == verdict.stall else ""
        share, total = verdict.shares[group.name], sum(parts.values())
        table.add_row(group.name, f"{share:.1%}", f"{total:.2f}", shown, style=style)
    console.print(table)

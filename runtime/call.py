"""One HTTP call: whose it is, what it asked for, and where its time goes (made per request)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import Request

from .critical_path import CriticalPath, Piece, Span
from .timeline import Stage, Timeline


@dataclass(frozen=True)
class Caller:
    """Whom a key names. `tenant` and `salt` follow from the key on the server; a caller can't choose them."""

    tenant: str = ""
    salt: str = ""  # keeps tenants' prefixes apart


class CallRecord(NamedTuple):
    """A call that is over: no text of it, only counts and times. `spans` add up to `seconds`.

    `began_at` is of the monotonic clock, as in `pieces`; `began_unix` is the same moment for people.
    """

    id: str
    route: str
    status: int
    began_unix: float
    began_at: float
    seconds: float
    path: CriticalPath
    first_token_seconds: float | None
    num_choices: int
    num_prompt: int
    num_cached: int
    num_output: int
    num_preemptions: int
    finish_reasons: tuple[str, ...]
    is_slow: bool  # its reader was dropped

    @property
    def spans(self) -> dict[str, float]:
        """Where its time went, found when somebody looks."""
        return self.path.spans()

    @property
    def pieces(self) -> list[Piece]:
        """Its path, stretch by stretch."""
        return self.path.pieces


class Call:
    """`id` is always fresh: a client's own never names anything inside. `fields`: of its head, the first of each name.
    `ignored`: fields of its body that were not understood.

    `path`: the spans of its time; what the loop did is in `timelines`, one a choice. The counts are of all choices.
    """

    def __init__(self, caller: Caller, fields: Mapping[bytes, bytes] | None = None) -> None:
        self.id = f"req-{secrets.token_hex(16)}"
        self.caller = caller
        self._fields = fields or {}
        self.key_name = self.client_id = ""  # for the log: whose key came, and what the client calls this
        self.path = CriticalPath()
        self.timelines: list[Timeline] = []
        self.ignored: list[str] = []
        self.wants_timings = False  # in the answer
        self.is_slow = False  # its reader was dropped
        self.refused: str | None = None  # the code of its refusal
        self.status = 0  # until the answer begins
        self.seconds = 0.0  # of wall time, once it is closed
        self.leave: Callable[[], None] | None = None  # gives up what is being made of it
        self.first_token_at: float | None = None
        self.num_prompt = self.num_cached = self.num_output = 0
        self.finish_reasons: list[str] = []

    @property
    def began_at(self) -> float:
        return self.path.began_at

    def field(self, name: bytes) -> str | None:
        """A field of its head."""
        value = self._fields.get(name)
        return None if value is None else value.decode("latin-1")

    def span(self, name: str) -> Span:
        """What happens inside belongs to `name`, one of `critical_path.SPANS`."""
        return self.path.span(name)

    def close(self) -> None:
        """The answer is out, or nobody wants it."""
        if self.path.is_in_loop and self.leave is not None:
            self.leave()
        now = time.monotonic()
        self.path.end(now)
        self.seconds = now - self.began_at

    def timings(self) -> dict[str, object]:
        """What an answer tells of its own time, in milliseconds, up to now; `total_ms` is the sum of `spans_ms`."""
        path = self.path
        path.end()
        first, decode = self.first_token_at, self._decode_seconds()
        return {
            "total_ms": _ms(path.seconds),
            "ttft_ms": None if first is None else _ms(first - path.began_at),
            "tokens_per_second": round(self.num_output / decode, 2) if decode else None,
            "spans_ms": {name: _ms(seconds) for name, seconds in path.spans().items()},
        }

    def _decode_seconds(self) -> float:
        """From the first token of any choice to the end of the last."""
        ends = [piece.ended_at for piece in self.path.pieces if piece.name == "host"]
        return ends[-1] - self.first_token_at if ends and self.first_token_at is not None else 0.0

    def record(self, route: str) -> CallRecord:
        """What is kept of a call that is closed."""
        path, first = self.path, self.first_token_at
        return CallRecord(
            id=self.id,
            route=route,
            status=self.status,
            began_unix=time.time() - (time.monotonic() - path.began_at),
            began_at=path.began_at,
            seconds=self.seconds,
            path=path,
            first_token_seconds=None if first is None else first - path.began_at,
            num_choices=len(self.timelines),
            num_prompt=self.num_prompt,
            num_cached=self.num_cached,
            num_output=self.num_output,
            num_preemptions=sum(line.count(Stage.QUEUE) - 1 for line in self.timelines if line.turns),
            finish_reasons=tuple(self.finish_reasons),
            is_slow=self.is_slow,
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def call_of(request: Request) -> Call:
    """The call that a request is."""
    call: Call = request.scope["state"]["call"]
    return call

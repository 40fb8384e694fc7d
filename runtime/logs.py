"""The process's log, for people or as a JSON object a line (set up once at start)."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from types import TracebackType
from typing import Any

from ostinato.engines.errors import OstinatoError

_Failure = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class HumanLines(logging.Formatter):
    """`time level: message key=value …`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the name is the library's
        fields = {name: value for name, value in _fields(record).items() if f"%({name})" not in str(record.msg)}
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in fields.items())])

    def formatException(self, failure: _Failure) -> str:  # noqa: N802
        return "\n".join(_frames(failure))


class JsonLines(logging.Formatter):
    """`time` is UTC; what a line tells beside its message are keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        milliseconds = int(record.msecs)
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = _frames(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


def set_up_logs(form: str, level: str) -> None:
    """`form`: human or json. Everything goes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else HumanLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level == "info":  # which would tell of each port's start and end, beside our own lines
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _frames(failure: _Failure) -> list[str]:
    """Where it happened. What a library's error says may repeat what a caller sent, so only ours are repeated."""
    kind, error, trace = failure
    if kind is None:
        return []
    lines = [line for frame in traceback.format_tb(trace) for line in frame.rstrip().splitlines()]
    return [*lines, f"{kind.__name__}: {error}" if isinstance(error, OstinatoError) else kind.__name__]

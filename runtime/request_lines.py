"""The requests of `ostinato generate`: one prompt of the command line, or a file of JSON objects (per call)."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ostinato.engines.errors import RequestError

from .request import SamplingParams

_FIELDS = {field.name for field in fields(SamplingParams)}


@dataclass(frozen=True)
class LineRequest:
    """One line of work: a prompt (text or ids) or messages, and its parameters."""

    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams


def read_requests(
    prompt: str | None, prompt_ids: str | None, path: Path | None, params: SamplingParams
) -> list[LineRequest]:
    """The requests of a call; a line of the file overrides `params` field by field."""
    if prompt is not None:
        return [LineRequest(prompt, None, params)]
    if prompt_ids is not None:
        return [LineRequest(_parse_ids(prompt_ids), None, params)]
    assert path is not None
    lines = [line for line in _read_text(path).split("\n") if line.strip()]
    if not lines:
        raise RequestError(f"{path} holds no request: give one JSON object a line")
    return [_parse_line(number, line, params) for number, line in enumerate(lines, 1)]


def _read_text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"can't read {path} ({error}): give a UTF-8 file, or - for standard input") from None


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--prompt-ids is {text[:60]!r}: give whole numbers separated by commas") from None


def _parse_line(number: int, line: str, params: SamplingParams) -> LineRequest:
    try:
        table = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RequestError(f"line {number} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise RequestError(f"line {number} is {type(table).__name__}: give a JSON object")
    prompt, ids, messages = (table.pop(key, None) for key in ("prompt", "prompt_ids", "messages"))
    if sum(source is not None for source in (prompt, ids, messages)) != 1:
        raise RequestError(f"line {number}: give exactly one of prompt, prompt_ids and messages")
    for name, source, kind in (("prompt", prompt, str), ("prompt_ids", ids, list), ("messages", messages, list)):
        if source is not None and not isinstance(source, kind):
            raise RequestError(f"line {number}: {name} is {type(source).__name__}, give a {kind.__name__}")
    if unknown := sorted(set(table) - _FIELDS):
        known = ", ".join(sorted(_FIELDS))
        raise RequestError(f"line {number} has unknown fields {', '.join(unknown)}: known are {known}")
    values: dict[str, Any] = {name: getattr(params, name) for name in _FIELDS} | _frozen(number, table)
    return LineRequest(prompt if prompt is not None else ids, messages, SamplingParams(**values))


def _frozen(number: int, table: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists as tuples; one stop string may stand without a list, and JSON writes the ids of a bias as text."""
    if isinstance(table.get("stop"), str):
        table["stop"] = [table["stop"]]
    if isinstance(bias := table.get("logit_bias"), dict):
        try:
            table["logit_bias"] = [(int(token_id), value) for token_id, value in bias.items()]
        except ValueError as error:
            raise RequestError(f"line {number}: logit_bias has a key that is no token id: {error}") from None
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}

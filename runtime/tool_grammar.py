"""Which outputs a use of tools allows, as a grammar (made per request that forces or restricts calls).

Forced: calls and nothing else. A strict tool in auto mode: any text, but what begins as a call is a call of a tool,
and a strict one's arguments fit its schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ostinato.engines.errors import RequestError

from .grammar_form import SPELLING, compilable
from .grammar_schema import check_schema
from .grammar_spec import GrammarSpec
from .serve_limits import ServeLimits
from .tool_style import ToolStyle
from .wire_tools import Function, ToolUse

_ANY_OBJECT: Mapping[str, object] = {"type": "object"}
# As templates show calls to a model: one space after commas and colons, none elsewhere.
_SPACING = {**SPELLING, "item_separator": ", ", "key_separator": ": "}
_TEXT = r"TEXT: /(.|\n)*/"


def tool_grammar(
    use: ToolUse, style: ToolStyle, special_ids: Mapping[str, int], limits: ServeLimits
) -> GrammarSpec | None:
    """None where any output will do. `special_ids`: of the style's marks that are special tokens, not characters.

    RequestError names the function whose schema can't be kept.
    """
    if not use.is_forced and not any(tool.function.strict for tool in use.tools):
        return None
    functions = [tool.function for tool in use.tools if use.name in (None, tool.function.name)]
    for index, tool in enumerate(use.tools):
        if tool.function in functions and _is_bound(tool.function, use):
            check_schema(tool.function.schema_of_arguments, f"tools.{index}.function.parameters", limits)
    rules = [f"call_{index}: {_call(function, use, style)}" for index, function in enumerate(functions)]
    begin, end = _mark(style.begin, special_ids), _mark(style.end, special_ids)
    lines = [
        *_start(use, style, begin),
        f"call: {begin} rest",
        f"rest: {_text(_after(style.opening, style.begin))} ({_any_of(len(functions))}) "
        f"{_text(_before(style.closing, style.end))} {end}",
        *rules,
    ]
    source = "\n".join(lines) + "\n"
    if len(source) > limits.max_grammar_bytes:
        raise RequestError(
            f"the schemas of all tools together exceed {limits.max_grammar_bytes} bytes: offer fewer or smaller ones",
            param="tools",
            code="unsupported_schema",
        )
    return GrammarSpec("lark", source, "tools")


def _start(use: ToolUse, style: ToolStyle, begin: str) -> list[str]:
    calls = "call" if use.at_most_one else f"call ({_text(style.joint)} call)*"
    if use.is_forced:
        return [f"start: {calls}"]
    if not style.begin:  # a whole output is calls or text
        return [f"start: {calls} | OTHER", r"OTHER: /([^{\s](.|\n)*)?/"]
    if begin.startswith("<["):
        marked, rules = "TEXT call", [_TEXT]
    else:
        marked, rules = "trigger rest", [f"trigger[lazy]: TEXT {begin}", _TEXT]
    return [f"start: TEXT | {marked}" if use.at_most_one else f"start: ({marked})* TEXT", *rules]


def _call(function: Function, use: ToolUse, style: ToolStyle) -> str:
    """A call within its marks."""
    given = function.schema_of_arguments if _is_bound(function, use) else _ANY_OBJECT
    schema = compilable(given) | {"x-guidance": _SPACING}
    head, tail = _after(style.head(function.name), style.opening), _before(style.tail, style.closing)
    return f"{_text(head)} %json {json.dumps(schema)} {_text(tail)}"


def _is_bound(function: Function, use: ToolUse) -> bool:
    """Whether its arguments must fit its schema."""
    return use.is_forced or bool(function.strict)


def _any_of(num_calls: int) -> str:
    return " | ".join(f"call_{index}" for index in range(num_calls))


def _mark(mark: str, special_ids: Mapping[str, int]) -> str:
    return f"<[{special_ids[mark]}]>" if mark in special_ids else _text(mark)


def _text(text: str) -> str:
    return json.dumps(text)


def _after(text: str, start: str) -> str:
    return text[len(start) :]


def _before(text: str, end: str) -> str:
    return text[: len(text) - len(end)]

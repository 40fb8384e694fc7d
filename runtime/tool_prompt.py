"""Tools, calls and results as plain messages, for a chat template that knows none of them (runs per request)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from .tool_style import TOLD, ToolStyle

Turn = Mapping[str, Any]

_LESSON = """\
# Tools

You may call functions to help with the request. Each line between the <tools> tags describes one of them as JSON:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and its arguments between <tool_call> tags, one pair of tags a call:
<tool_call>
{{"name": <name of the function>, "arguments": <object of its arguments>}}
</tool_call>
Each result comes back between <tool_response> tags. Where no function is of use, answer in plain words."""


def for_template(
    style: ToolStyle | None, messages: Sequence[Turn], tools: Sequence[Any]
) -> tuple[Sequence[Turn], Sequence[Any]]:
    """Messages and tools as a template of that style takes them."""
    if style is None or style.is_native:
        return messages, tools
    return told(messages, tools, style.teller), ()


def told(messages: Sequence[Turn], tools: Sequence[Any], teller: str = "system") -> list[Turn]:
    """The conversation in the roles system, user and assistant alone; its first turn of `teller` tells of `tools`."""
    turns = list(messages)
    if tools:
        lesson = _LESSON.format(tools="\n".join(_json(tool) for tool in tools))
        if all(turn.get("role") != teller for turn in turns):
            turns.insert(0, {"role": teller})
        at = next(number for number, turn in enumerate(turns) if turn.get("role") == teller)
        content = turns[at].get("content")
        texts = [content, lesson] if teller == "system" else [lesson, content]
        turns[at] = {**turns[at], "content": "\n\n".join(text for text in texts if text)}
    plain: list[Turn] = []
    for are_results, group in groupby(turns, key=lambda turn: turn.get("role") == "tool"):
        if are_results:  # of one turn's calls, together: many templates want roles to alternate
            results = [f"<tool_response>\n{turn.get('content') or ''}\n</tool_response>" for turn in group]
            plain.append({"role": "user", "content": "\n".join(results)})
        else:
            plain.extend(_without_calls(turn) for turn in group)
    return plain


def _without_calls(turn: Turn) -> Turn:
    """An assistant's calls as it would write them."""
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    texts = [TOLD.call(call["function"]["name"], _json(call["function"]["arguments"])) for call in calls]
    content = turn.get("content")
    return {"role": "assistant", "content": TOLD.joint.join([content, *texts] if content else texts)}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

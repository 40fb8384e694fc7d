"""JSON schemas of objects that by one of their fields have other ones (read once at start)."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NAME: dict[str, Schema] = {"name": {"type": ["string", "null"]}}
_CONTENT: Schema = {
    "anyOf": [_TEXT, {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}}],
}
_CALLS: Schema = {"type": "array", "items": {"$ref": "#/components/schemas/ToolCall"}, "minItems": 1}
_EMPTY: Schema = {"enum": [None, []]}  # as OpenAI's clients send an assistant's turn back


def _turn(*roles: str, needed: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": {"role": {"enum": list(roles)}, **needed, **optional},
        "required": ["role", *needed],
        "additionalProperties": _EMPTY,
    }


MESSAGE: Schema = {
    "anyOf": [
        _turn("system", "developer", "user", "assistant", needed={"content": _CONTENT}, optional=_NAME),
        _turn(
            "assistant",
            needed={"tool_calls": _CALLS},
            optional={"content": {"anyOf": [_CONTENT, {"type": "null"}]}, **_NAME},
        ),
        _turn("tool", needed={"content": _CONTENT, "tool_call_id": _TEXT}, optional=_NAME),
    ]
}

_LEFT_OUT: Schema = {"type": "null"}
_NAMED: dict[str, Schema] = {
    "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "schema": {"type": "object"},
}


def _form(kind: str, needed: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": {"type": {"enum": [kind]}, **needed, **optional},
        "required": ["type", *needed],
        "additionalProperties": _LEFT_OUT,
    }


TOKENIZED: Schema = {  # one of the two, without what only the other has
    "anyOf": [
        {
            "required": ["prompt"],
            "properties": {"prompt": _TEXT, "messages": _EMPTY, "add_generation_prompt": _LEFT_OUT},
        },
        {
            "required": ["messages"],
            "properties": {
                "prompt": _LEFT_OUT,
                "messages": {"type": "array", "minItems": 1},
                "add_special_tokens": _LEFT_OUT,
            },
        },
    ]
}
TEXT_FORMAT: Schema = {
    "anyOf": [
        _form("text", {}, {}),
        _form("json_object", {}, {}),
        _form(
            "json_schema",
            _NAMED,
            {"strict": {"type": ["boolean", "null"]}, "description": {"type": ["string", "null"]}},
        ),
    ]
}

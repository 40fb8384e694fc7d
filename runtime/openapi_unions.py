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
_LEFT_OUT: Schema = {"type": "null"}


def _turn(*roles: str, needed: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    others = {"tool_calls": _EMPTY, "tool_call_id": _EMPTY}
    return {
        "type": "object",
        "properties": {"role": {"enum": list(roles)}, **others, **needed, **optional},
        "required": ["role", *needed],
    }


_TURNS = [
    _turn("system", "developer", "user", "assistant", needed={"content": _CONTENT}, optional=_NAME),
    _turn(
        "assistant",
        needed={"tool_calls": _CALLS},
        optional={"content": {"anyOf": [_CONTENT, {"type": "null"}]}, **_NAME},
    ),
    _turn("tool", needed={"content": _CONTENT, "tool_call_id": _TEXT}, optional=_NAME),
]


def message(unserved: dict[str, Schema], *, strict_fields: bool) -> Schema:
    """A turn, whose role says what else it has."""
    kept = dict.fromkeys(unserved, _EMPTY)
    others = _EMPTY if strict_fields else True
    return {
        "anyOf": [
            {**turn, "properties": {**kept, **turn["properties"]}, "additionalProperties": others} for turn in _TURNS
        ]
    }


_NAMED: dict[str, Schema] = {
    "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "schema": {"type": "object"},
}


def _form(kind: str, needed: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": {"type": {"enum": [kind]}, **needed, **optional},
        "required": ["type", *needed],
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
_FORMS = [
    _form("text", {}, {}),
    _form("json_object", {}, {}),
    _form(
        "json_schema",
        _NAMED,
        {"strict": {"type": ["boolean", "null"]}, "description": {"type": ["string", "null"]}},
    ),
]


def text_format(unserved: dict[str, Schema], *, strict_fields: bool) -> Schema:
    """What a text must be, whose type says what else it has."""
    kept = dict.fromkeys((*_NAMED, "strict", "description", *unserved), _LEFT_OUT)
    others = _LEFT_OUT if strict_fields else True
    return {
        "anyOf": [
            {**form, "properties": {**kept, **form["properties"]}, "additionalProperties": others} for form in _FORMS
        ]
    }

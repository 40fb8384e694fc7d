"""JSON schemas of what the server answers; every object is closed (read once at start)."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}


def obj(optional: dict[str, Schema] | None = None, /, **fields: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": {**fields, **(optional or {})},
        "required": list(fields),
        "additionalProperties": False,
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


ERROR = obj(error=obj(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT)))

MODEL = obj(id=TEXT, object=one_of("model"), created=COUNT, owned_by=TEXT, max_model_len=COUNT)
MODELS = obj(object=one_of("list"), data=array(MODEL))

USAGE = obj(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=obj(cached_tokens=COUNT),
)

_TOP = obj(token=TEXT, logprob=NUMBER, bytes=array(COUNT))
_ENTRY = obj(token=TEXT, logprob=NUMBER, bytes=array(COUNT), top_logprobs=array(_TOP))
_LISTS = obj(
    tokens=array(TEXT),
    token_logprobs=array(nullable(NUMBER)),
    top_logprobs=array(nullable({"type": "object", "additionalProperties": NUMBER})),
    text_offset=array(COUNT),
)
TIMINGS: dict[str, Schema] = {"timings": {"type": "object"}}  # where they were asked for


def _answer(kind: str, choice: Schema, optional: dict[str, Schema], /, **fields: Schema) -> Schema:
    """What completions and chats have in common, whole or as one of a stream's chunks."""
    return obj(optional, id=TEXT, object=one_of(kind), created=COUNT, model=TEXT, choices=array(choice), **fields)


COMPLETION = _answer(
    "text_completion",
    obj(index=COUNT, text=TEXT, logprobs=nullable(_LISTS), finish_reason=one_of("stop", "length")),
    TIMINGS,
    usage=USAGE,
)

_CALL = obj(id=TEXT, type=one_of("function"), function=obj(name=TEXT, arguments=TEXT))
_CHAT_LOGPROBS = obj(content=array(_ENTRY), refusal={"type": "null"})
CHAT = _answer(
    "chat.completion",
    obj(
        index=COUNT,
        message=obj(
            {"tool_calls": array(_CALL)}, role=one_of("assistant"), content=nullable(TEXT), refusal=nullable(TEXT)
        ),
        logprobs=nullable(_CHAT_LOGPROBS),
        finish_reason=one_of("stop", "length", "tool_calls"),
    ),
    TIMINGS,
    usage=USAGE,
)

_CALL_DELTA = obj(
    {"id": TEXT, "type": one_of("function"), "function": obj({"name": TEXT, "arguments": TEXT})}, index=COUNT
)
_DELTA = obj({"role": one_of("assistant"), "content": nullable(TEXT), "tool_calls": array(_CALL_DELTA)})


def _chunk(kind: str, reasons: tuple[str, ...], logprobs: Schema, **content: Schema) -> Schema:
    """One of a stream's: a choice's, or at the end one without choices that tells of them all."""
    choice = obj(index=COUNT, **content, logprobs=nullable(logprobs), finish_reason=one_of(None, *reasons))
    return _answer(kind, choice, TIMINGS | {"usage": nullable(USAGE)})


def events(payload: Schema) -> Schema:
    """One server-sent event; comments between events keep a connection open."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    return obj({"event": TEXT}, data=data)


def _chunks(payload: Schema) -> Schema:
    """An event that is a chunk, or an error in the place of the rest, or the mark of the end."""
    either = events({"anyOf": [payload, ERROR]})
    either["properties"]["data"] = {"anyOf": [{"const": "[DONE]"}, either["properties"]["data"]]}
    return either


COMPLETION_EVENTS = _chunks(_chunk("text_completion", ("stop", "length"), _LISTS, text=TEXT))
CHAT_EVENTS = _chunks(
    _chunk(
        "chat.completion.chunk",
        ("stop", "length", "tool_calls"),
        _CHAT_LOGPROBS,
        delta=_DELTA,
    )
)

_STATUS = one_of("completed", "incomplete", "in_progress")
_MESSAGE = obj(
    type=one_of("message"),
    id=TEXT,
    status=_STATUS,
    role=one_of("assistant"),
    content=array(
        obj(type=one_of("output_text"), text=TEXT, annotations=array({"not": {}}), logprobs=array(_ENTRY)),
    ),
)
_FUNCTION_CALL = obj(type=one_of("function_call"), id=TEXT, call_id=TEXT, name=TEXT, arguments=TEXT, status=_STATUS)
_NAMED_TOOL = obj(type=one_of("function"), name=TEXT)
_TOOL = obj(
    type=one_of("function"),
    name=TEXT,
    description=nullable(TEXT),
    parameters=nullable({"type": "object"}),
    strict=nullable({"type": "boolean"}),
)
_FORMAT = obj(
    {"name": TEXT, "schema": {"type": "object"}, "strict": {"type": "boolean"}, "description": TEXT},
    type=one_of("text", "json_object", "json_schema"),
)
_RESPONSE_USAGE = obj(
    input_tokens=COUNT,
    input_tokens_details=obj(cached_tokens=COUNT, cache_write_tokens=COUNT),
    output_tokens=COUNT,
    output_tokens_details=obj(reasoning_tokens=COUNT),
    total_tokens=COUNT,
)
RESPONSE = obj(
    TIMINGS,
    id=TEXT,
    object=one_of("response"),
    created_at=COUNT,
    status=_STATUS,
    background=one_of(False),
    error={"type": "null"},
    incomplete_details=nullable(obj(reason=one_of("max_output_tokens"))),
    instructions=nullable(TEXT),
    max_output_tokens=nullable(COUNT),
    metadata={"type": "object", "additionalProperties": TEXT},
    model=TEXT,
    output=array({"anyOf": [_MESSAGE, _FUNCTION_CALL]}),
    parallel_tool_calls={"type": "boolean"},
    previous_response_id={"type": "null"},
    reasoning=obj(effort={"type": "null"}, summary={"type": "null"}),
    store=one_of(False),
    temperature=NUMBER,
    text=obj(format=_FORMAT),
    tool_choice={"anyOf": [one_of("none", "auto", "required"), _NAMED_TOOL]},
    tools=array(_TOOL),
    top_logprobs=COUNT,
    top_p=NUMBER,
    truncation=one_of("disabled"),
    usage=_RESPONSE_USAGE,
    user=nullable(TEXT),
)

RESPONSE_EVENTS = events(
    {
        "type": "object",
        "properties": {"type": {"type": "string", "pattern": "^response[.]"}, "sequence_number": COUNT},
        "required": ["type", "sequence_number"],
    }
)

TOKENIZED = obj(count=COUNT, max_model_len=COUNT, tokens=array(COUNT), token_strs=nullable(array(TEXT)))
DETOKENIZED = obj(prompt=TEXT)
HEALTH = obj(status=one_of("alive"))
READY = obj(status=one_of("ready"))
ANY_OBJECT: Schema = {"type": "object"}

"""GET /openapi.json: the API as it is checked and answered here (made once the model is known)."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from . import openapi_replies as replies
from .chunks import to_json
from .door import Door
from .openapi_bodies import BodySchemas, Known, Schema, unserved_fields
from .openapi_unions import TOKENIZED, message, text_format
from .serve_limits import ServeLimits
from .server_status import READ
from .wire_chat import ChatBody, Message
from .wire_completions import CompletionBody
from .wire_responses import ResponseBody, TextFormat
from .wire_tokens import DetokenizeBody, TokenizeBody

_ABOUT = "OpenAI's API as this server takes and answers it; fields of it that are not served are refused by name."
_ERRORS = {
    400: "The request is not as the schema says, or can't be served as it is.",
    401: "A key is needed, and none or an unknown one came.",
    403: "The host name that was called is none of this server's, or the page's origin may not call.",
    404: "There is no such model or route.",
    405: "The route has other methods.",
    408: "The request did not arrive in time, or did not end in time.",
    413: "The body is too large.",
    415: "The body is of another media type, or compressed.",
    429: "Too much at once: try again later.",
    431: "The request's head is too large.",
    500: "The server failed at this request.",
    503: "The server takes no calls now: try again later.",
}
_OPEN = (400, 403, 431)  # what any route may answer
_ASKED = (*_OPEN, 401, 404, 503)  # and any but health
_SENT = (*_ASKED, 408, 413, 415)  # and any that reads a body
_RETRY = {"retry-after": {"description": "Seconds to wait.", "schema": replies.COUNT}}
_IGNORED = {
    "x-ostinato-ignored": {
        "description": "Paths of fields of the body that nobody knows, left out.",
        "schema": replies.TEXT,
    }
}


def openapi_routes(door: Door) -> list[Route]:
    pages: dict[Known | None, bytes] = {}  # each made once, on another thread: it takes long, and streams go on

    async def openapi(_: Request) -> Response:
        known = _known(door)
        if known not in pages:
            pages[known] = await asyncio.to_thread(lambda: to_json(_document(door, known)))
        return Response(pages[known], media_type="application/json")

    return [Route("/openapi.json", openapi, methods=READ)]


def _known(door: Door) -> Known | None:
    """None while the model is loading."""
    if door.bridge is None:
        return None
    return Known(door.served().name, door.bridge.vocab_size, door.bridge.limits.max_context)


def _document(door: Door, known: Known | None) -> dict[str, Any]:
    """The OpenAPI description of one server."""
    bodies = BodySchemas(door.limits, known, strict_fields=door.strict_fields)
    paths = {**_generating(bodies, door.limits), **_tokens(bodies, door.limits), **_telling(known)}
    bodies.by_name["TokenizeBody"] |= TOKENIZED
    bodies.by_name |= {
        "Message": message(unserved_fields(Message), strict_fields=door.strict_fields),
        "TextFormat": text_format(unserved_fields(TextFormat), strict_fields=door.strict_fields),
    }
    for name in ("CalledFunction", "FunctionCall"):
        bodies.by_name[name]["properties"]["arguments"] = {"type": "string", "format": "json-object"}
    return {
        "openapi": "3.2.0",  # the first that can describe events
        "info": {"title": "ostinato", "version": version("ostinato"), "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": {**bodies.by_name, "Error": replies.ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _generating(bodies: BodySchemas, limits: ServeLimits) -> dict[str, Any]:
    """The routes that make text."""
    top = {"minimum": 0, "maximum": limits.max_top_logprobs}
    some = bodies.max_tokens(1)
    completion = bodies.add(
        CompletionBody,
        {
            "logprobs": {"minimum": 0, "maximum": limits.max_logprobs},
            "best_of": {"minimum": 1, "maximum": limits.max_choices},
            "max_tokens": bodies.max_tokens(0),
            "prompt": _prompt(bodies.token_id, limits),
        },
    )
    chat = bodies.add(
        ChatBody,
        {
            "max_tokens": some,
            "max_completion_tokens": some,
            "top_logprobs": top,
            "messages": {"minItems": 1, "maxItems": limits.max_messages},
        },
    )
    response = bodies.add(ResponseBody, {"max_output_tokens": some, "top_logprobs": top})
    return {
        path: {"post": _operation(path, (*_SENT, 429, 500), reply, body, events)}
        for path, body, reply, events in (
            ("/v1/completions", completion, replies.COMPLETION, replies.COMPLETION_EVENTS),
            ("/v1/chat/completions", chat, replies.CHAT, replies.CHAT_EVENTS),
            ("/v1/responses", response, replies.RESPONSE, replies.RESPONSE_EVENTS),
        )
    }


def _prompt(token_id: Schema, limits: ServeLimits) -> Schema:
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "items": token_id, "minItems": 1}
    several = [{"type": "array", "items": kind, "minItems": 1, "maxItems": limits.max_prompts} for kind in (text, ids)]
    return {"anyOf": [text, ids, *several]}


def _tokens(bodies: BodySchemas, limits: ServeLimits) -> dict[str, Any]:
    """The routes of the tokenizer."""
    tokenize = bodies.add(
        TokenizeBody,
        {"prompt": {"maxLength": limits.max_tokenize_chars}, "messages": {"maxItems": limits.max_messages}},
    )
    detokenize = bodies.add(
        DetokenizeBody,
        {"tokens": {"items": bodies.token_id, "maxItems": limits.max_detokenize_tokens}},
    )
    return {
        "/tokenize": {"post": _operation("/tokenize", (*_SENT, 429), replies.TOKENIZED, tokenize)},
        "/detokenize": {"post": _operation("/detokenize", (*_SENT, 429), replies.DETOKENIZED, detokenize)},
    }


def _telling(known: Known | None) -> dict[str, Any]:
    """The routes that tell of the server."""
    name: Schema = {"type": "string", "minLength": 1} | ({} if known is None else {"enum": [known.name]})
    path = {"name": "name", "in": "path", "required": True, "schema": name}
    return {
        "/v1/models": {"get": _operation("/v1/models", _ASKED, replies.MODELS)},
        "/v1/models/{name}": {
            "get": {**_operation("/v1/models/{name}", _ASKED, replies.MODEL), "parameters": [path]},
        },
        "/info": {"get": _operation("/info", _ASKED, replies.ANY_OBJECT)},
        "/openapi.json": {"get": _operation("/openapi.json", _ASKED, replies.ANY_OBJECT)},
        "/health": {"get": {**_operation("/health", _OPEN, replies.HEALTH), "security": []}},
        "/health/ready": {"get": {**_operation("/health/ready", (*_OPEN, 503), replies.READY), "security": []}},
    }


def _operation(
    path: str,
    statuses: tuple[int, ...],
    reply: Schema,
    body: Schema | None = None,
    events: Schema | None = None,
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": reply}}
    if events is not None:
        content["text/event-stream"] = {"itemSchema": events}
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    if body is not None:
        answers["200"]["headers"] = _IGNORED
    for status in sorted(statuses):
        answers[str(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            **({"headers": _RETRY} if status in (429, 503) else {}),
        }
    operation: dict[str, Any] = {"operationId": path.strip("/").replace("/", "_"), "responses": answers}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation

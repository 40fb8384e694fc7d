"""POST /tokenize and /detokenize (lines run per request)."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ostinato.engines.errors import RequestError

from .bridge import Bridge
from .call import call_of
from .chunks import to_json
from .door import Door
from .request import check_token_ids
from .server_body import digest, read_body
from .tokenizer import Tokenizer
from .tool_prompt import for_template
from .wire_chat import turns_of
from .wire_tokens import DetokenizeBody, TokenizeBody


def token_routes(door: Door) -> list[Route]:
    async def tokenize(request: Request) -> Response:
        body, num_bytes = await read_body(request, door, TokenizeBody)
        bridge = _bridge(door, body.model)
        body.check(door.limits)
        with call_of(request).span("tokenize"):
            answer = await digest(num_bytes, partial(_tokenized, bridge, body))
        return Response(answer, media_type="application/json")

    async def detokenize(request: Request) -> Response:
        body, num_bytes = await read_body(request, door, DetokenizeBody)
        bridge = _bridge(door, body.model)
        if len(body.tokens) > door.limits.max_detokenize_tokens:
            raise RequestError(f"tokens has more than {door.limits.max_detokenize_tokens} ids", param="tokens")
        with call_of(request).span("detokenize"):
            answer = await digest(num_bytes, partial(_detokenized, bridge, body))
        return Response(answer, media_type="application/json")

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def _bridge(door: Door, model: str | None) -> Bridge:
    return door.served().bridge if model is None else door.find(model)


def _tokenized(bridge: Bridge, body: TokenizeBody) -> bytes:
    tokens = _tokens(bridge.tokenizer, body)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": bridge.limits.max_context, "tokens": tokens}
    names = [bridge.tokenizer.token_text(token).text for token in tokens] if body.return_token_strs else None
    return to_json({**answer, "token_strs": names})


def _tokens(tokenizer: Tokenizer, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    messages, _ = for_template(tokenizer.tool_style, turns_of(body.messages), ())
    return tokenizer.apply_chat_template(messages, add_generation_prompt=body.add_generation_prompt is not False)


def _detokenized(bridge: Bridge, body: DetokenizeBody) -> bytes:
    check_token_ids("tokens", body.tokens, bridge.vocab_size)
    return to_json({"prompt": bridge.tokenizer.decode(body.tokens, skip_special_tokens=False)})

"""POST /v1/chat/completions (lines run per request)."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from .answer import StreamAnswer, WholeAnswer
from .answer_chat import ChatWriter
from .bridge import Bridge, Prompt
from .door import Door
from .server_body import MAX_INLINE_BYTES, read_body
from .wire import check_stream, parse_body
from .wire_chat import ChatBody


def chat_routes(door: Door) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        raw = await read_body(request)
        body = parse_body(ChatBody, raw)
        bridge = door.find(body.model)
        check_stream(body)
        params = body.params()
        token_ids = await _token_ids(bridge, body, len(raw))
        stream = bridge.submit([Prompt(token_ids, params)], salt=body.cache_salt or "", priority=body.priority or 0)
        writer = ChatWriter(door.head("chatcmpl"), body, params.n, bridge.tokenizer)
        return StreamAnswer(stream, writer) if body.stream else WholeAnswer(stream, writer)

    return router


async def _token_ids(bridge: Bridge, body: ChatBody, num_bytes: int) -> list[int]:
    messages = [message.for_template() for message in body.messages]
    if num_bytes <= MAX_INLINE_BYTES:
        return bridge.tokenizer.apply_chat_template(messages)
    return await asyncio.to_thread(bridge.tokenizer.apply_chat_template, messages)

"""POST /v1/chat/completions (lines run per request)."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from .answer import StreamAnswer, WholeAnswer
from .answer_chat import ChatWriter
from .bridge import Prompt
from .call import call_of
from .door import Door
from .server_body import digest, read_body
from .wire import check_stream, parse_body
from .wire_chat import ChatBody


def chat_routes(door: Door) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        call = call_of(request)
        with call.span("parse"):
            raw = await read_body(request)
            body = await digest(len(raw), partial(parse_body, ChatBody, raw))
        bridge = door.find(body.model)
        check_stream(body)
        params = body.params()
        messages = [message.for_template() for message in body.messages]
        with call.span("tokenize"):
            token_ids = await digest(len(raw), partial(bridge.tokenizer.apply_chat_template, messages))
        prompts = [Prompt(token_ids, params)]
        stream = bridge.submit(prompts, call, salt=body.cache_salt or "", priority=body.priority or 0)
        writer = ChatWriter(door.head("chatcmpl"), body, params.n, bridge.tokenizer)
        return StreamAnswer(stream, writer) if body.stream else WholeAnswer(stream, writer)

    return router

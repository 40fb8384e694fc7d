"""POST /v1/completions (lines run per request)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response

from ostinato.engines.errors import RequestError

from .answer import StreamAnswer, WholeAnswer
from .answer_completions import NO_ECHO, CompletionWriter, Echo
from .bridge import Bridge, Prompt
from .call import call_of
from .door import Door
from .server_body import digest, read_body
from .tokenizer import Tokenizer
from .wire import MAX_CHOICES, check_stream, parse_body
from .wire_completions import DEFAULT_MAX_TOKENS, CompletionBody

Given = Sequence[str | list[int]]


def completion_routes(door: Door) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        call = call_of(request)
        with call.span("parse"):
            raw = await read_body(request)
            body = await digest(len(raw), partial(parse_body, CompletionBody, raw))
        bridge = door.find(body.model)
        check_stream(body)
        params = body.params()
        given = await digest(len(raw), body.prompts)
        if len(given) * params.n > MAX_CHOICES:
            raise RequestError(
                f"{len(given)} prompts with n {params.n}: ask for {MAX_CHOICES} choices or fewer", param="n"
            )
        with call.span("tokenize"):
            ids = await digest(len(raw), partial(_encode, bridge.tokenizer, given))
        prompts = _prompts(bridge, body, ids)
        stream = bridge.submit(prompts, call, salt=body.cache_salt or "", priority=body.priority or 0)
        echoes = [
            _echo(bridge.tokenizer, text, token_ids) if body.echo else NO_ECHO
            for text, token_ids in zip(given, ids, strict=True)
            for _ in range(params.n)
        ]
        writer = CompletionWriter(door.head("cmpl"), body, stream, bridge.tokenizer, echoes)
        return StreamAnswer(stream, writer) if body.stream else WholeAnswer(stream, writer)

    return router


def _encode(tokenizer: Tokenizer, given: Given) -> list[list[int]]:
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]


def _prompts(bridge: Bridge, body: CompletionBody, ids: Sequence[list[int]]) -> list[Prompt]:
    """OpenAI's default of 16 tokens is no wish of the caller's: near the context's end it gives way."""
    params = body.params()
    if body.max_tokens is not None:
        return [Prompt(token_ids, params) for token_ids in ids]
    rests = (max(1, bridge.limits.max_context - len(token_ids)) for token_ids in ids)
    return [
        Prompt(token_ids, replace(params, max_tokens=min(DEFAULT_MAX_TOKENS, rest)))
        for token_ids, rest in zip(ids, rests, strict=True)
    ]


def _echo(tokenizer: Tokenizer, given: str | list[int], token_ids: list[int]) -> Echo:
    text = given if isinstance(given, str) else tokenizer.decode(token_ids, skip_special_tokens=False)
    return Echo(text, token_ids)

"""POST /v1/completions (lines run per request)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .answer import StreamAnswer, WholeAnswer
from .answer_completions import NO_ECHO, CompletionWriter, Echo
from .bridge import Bridge, Prompt
from .call import call_of
from .door import Door
from .request import SamplingParams
from .server_body import digest, read_body
from .tokenizer import Tokenizer
from .wire import check_stream
from .wire_completions import DEFAULT_MAX_TOKENS, CompletionBody
from .wire_limits import check_limits, check_total

Given = Sequence[str | list[int]]


def completion_routes(door: Door) -> list[Route]:
    async def completions(request: Request) -> Response:
        call = call_of(request)
        door.check_room()
        body, num_bytes = await read_body(request, door, CompletionBody)
        bridge = door.find(body.model)
        check_stream(body.stream, body.stream_options)
        call.wants_timings = bool(body.timings)
        params = body.params(door.limits)
        given = await digest(num_bytes, partial(body.prompts, door.limits))
        check_limits(params, len(given), door.limits)
        with call.span("tokenize"):
            ids = await digest(num_bytes, partial(_encode, bridge, given))
        prompts = _prompts(bridge, body, params, ids)
        if (spec := body.grammar()) is not None:
            with call.span("grammar"):
                grammar = await bridge.grammars.compile(spec)
            prompts = [prompt._replace(grammar=grammar) for prompt in prompts]
        check_total(prompts, bridge.limits.max_context, door.limits)
        stream = bridge.submit(prompts, call, salt=body.cache_salt or "", priority=body.priority or 0)
        echoes = [
            _echo(bridge.tokenizer, text, token_ids) if body.echo else NO_ECHO
            for text, token_ids in zip(given, ids, strict=True)
            for _ in range(params.n)
        ]
        writer = CompletionWriter(door.head("cmpl-"), body, stream, bridge.tokenizer, echoes)
        return StreamAnswer(stream, writer) if body.stream else WholeAnswer(stream, writer)

    return [Route("/v1/completions", completions, methods=["POST"])]


def _encode(bridge: Bridge, given: Given) -> list[list[int]]:
    encode = partial(bridge.tokenizer.encode, max_tokens=bridge.limits.max_context)
    return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]


def _prompts(bridge: Bridge, body: CompletionBody, params: SamplingParams, ids: Sequence[list[int]]) -> list[Prompt]:
    """OpenAI's default of 16 tokens is no wish of the caller's: near the context's end it gives way."""
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

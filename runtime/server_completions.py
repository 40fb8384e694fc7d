"""POST /v1/completions (lines run per request)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .answer import StreamAnswer, WholeAnswer
from .answer_completions import CompletionWriter, Given
from .bridge import Bridge, Prompt
from .call import call_of
from .detokenizer import MARK, detokenizer
from .door import Door
from .request import SamplingParams
from .server_body import digest, read_body
from .tokenizer import Tokenizer
from .wire import check_stream
from .wire_completions import DEFAULT_MAX_TOKENS, CompletionBody
from .wire_limits import check_limits, check_total


def completion_routes(door: Door) -> list[Route]:
    async def completions(request: Request) -> Response:
        call = call_of(request)
        door.check_room()
        body, num_bytes = await read_body(request, door, CompletionBody)
        bridge = door.find(body.model)
        check_stream(body.stream, body.stream_options)
        call.wants_timings = bool(body.timings)
        params = body.params(door.limits)
        texts = await digest(num_bytes, partial(body.prompts, door.limits))
        check_limits(params, len(texts), door.limits)
        with call.span("tokenize"):
            ids = await digest(num_bytes, partial(_encode, bridge, texts))
        given = [_given(bridge.tokenizer, body, text, token_ids) for text, token_ids in zip(texts, ids, strict=True)]
        prompts = _prompts(bridge, body, params, given)
        if (spec := body.grammar()) is not None:
            with call.span("grammar"):
                grammar = await bridge.grammars.compile(spec)
            prompts = [prompt._replace(grammar=grammar) for prompt in prompts]
        check_total(prompts, bridge.limits.max_context, door.limits)
        stream = bridge.submit(prompts, call, salt=body.cache_salt or "", priority=body.priority or 0)
        made = [prompt for prompt in given for _ in range(params.n)]
        writer = CompletionWriter(door.head("cmpl-"), body, stream, bridge.tokenizer, made)
        return StreamAnswer(stream, writer) if body.stream else WholeAnswer(stream, writer)

    return [Route("/v1/completions", completions, methods=["POST"])]


def _encode(bridge: Bridge, texts: Sequence[str | list[int]]) -> list[list[int]]:
    encode = partial(bridge.tokenizer.encode, max_tokens=bridge.limits.max_context)
    return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in texts]


def _given(tokenizer: Tokenizer, body: CompletionBody, text: str | list[int], token_ids: list[int]) -> Given:
    if not body.echo:
        return Given(token_ids)
    decoded = tokenizer.decode(token_ids, skip_special_tokens=False)
    whole = text if isinstance(text, str) else decoded
    num_marks = detokenizer(tokenizer, token_ids, body.skip_special_tokens is not False).num_marks
    echo = whole.removesuffix(MARK * num_marks)
    return Given(token_ids, echo, len(decoded) - len(whole), echo != whole)


def _prompts(bridge: Bridge, body: CompletionBody, params: SamplingParams, given: Sequence[Given]) -> list[Prompt]:
    """OpenAI's default of 16 tokens is no wish of the caller's: near the context's end it gives way."""
    prompts = []
    for token_ids, _, _, is_cut in given:
        if body.max_tokens is None:
            rest = max(1, bridge.limits.max_context - len(token_ids))
            params = replace(params, max_tokens=min(DEFAULT_MAX_TOKENS, rest))
        prompts.append(Prompt(token_ids, params, is_cut=is_cut))
    return prompts

"""POST /v1/responses (lines run per request)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ostinato.engines.errors import RequestError

from .answer import StreamAnswer, WholeAnswer
from .answer_responses import ResponseWriter
from .bridge import Bridge, Prompt
from .call import Call, call_of
from .door import Door
from .server_body import digest, read_body
from .stream import Stream
from .tool_offer import OfferedTools, answer_grammar
from .tool_prompt import for_template
from .wire import renamed
from .wire_limits import check_limits, check_total
from .wire_responses import ResponseBody


def response_routes(door: Door) -> list[Route]:
    async def responses(request: Request) -> Response:
        call = call_of(request)
        door.check_room()
        body, num_bytes = await read_body(request, door, ResponseBody)
        bridge = door.find(body.model)
        call.wants_timings = bool(body.timings)
        with renamed(body.names):
            use = body.tool_use(door.limits)
            tools = None if use is None else OfferedTools(use, bridge.tokenizer)
            stream = await _submit(door, bridge, call, body, tools, num_bytes)
        writer = ResponseWriter(door.head("resp_"), body, bridge.tokenizer, tools)
        return StreamAnswer(stream, writer) if body.stream else WholeAnswer(stream, writer)

    return [Route("/v1/responses", responses, methods=["POST"])]


async def _submit(
    door: Door, bridge: Bridge, call: Call, body: ResponseBody, tools: OfferedTools | None, num_bytes: int
) -> Stream:
    params = body.params(door.limits)
    check_limits(params, 1, door.limits)
    if tools is not None and body.has_logprobs:
        raise RequestError(
            "logprobs of an answer that may call functions are not supported here: leave include out", param="include"
        )
    spec = await digest(num_bytes, partial(answer_grammar, body.grammar, tools, door.limits))
    with call.span("tokenize"):
        token_ids = await digest(num_bytes, partial(_prompt_ids, bridge, body, tools))
    with call.span("grammar"):
        grammar = None if spec is None else await bridge.grammars.compile(spec)
    if tools is not None and tools.special_ids:  # the marks of calls must show
        params = replace(params, skip_special_tokens=False)
    prompts = [Prompt(token_ids, params, grammar)]
    check_total(prompts, bridge.limits.max_context, door.limits)
    return bridge.submit(prompts, call, salt=body.cache_salt or "", priority=body.priority or 0)


def _prompt_ids(bridge: Bridge, body: ResponseBody, tools: OfferedTools | None) -> list[int]:
    tokenizer = bridge.tokenizer
    messages, shown = for_template(tokenizer.tool_style, body.messages(), () if tools is None else tools.for_template)
    return tokenizer.apply_chat_template(messages, tools=shown, max_tokens=bridge.limits.max_context)

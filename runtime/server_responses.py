"""POST /v1/responses (lines run per request)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .answer import StreamAnswer, WholeAnswer
from .answer_responses import ResponseWriter
from .bridge import Bridge, Prompt
from .call import Call, call_of
from .chat_template import Message
from .door import Door
from .server_body import digest, read_body
from .stream import Stream
from .wire import renamed
from .wire_limits import check_limits, check_total
from .wire_responses import ResponseBody

_NAMES = {"max_tokens": "max_output_tokens", "prompt": "input", "messages": "input"}  # of inner fields, in this body


def response_routes(door: Door) -> list[Route]:
    async def responses(request: Request) -> Response:
        call = call_of(request)
        door.check_room()
        body, num_bytes = await read_body(request, door, ResponseBody)
        bridge = door.find(body.model)
        call.wants_timings = bool(body.timings)
        with renamed(_NAMES):
            stream = await _submit(door, bridge, call, body, num_bytes)
        writer = ResponseWriter(door.head("resp_"), body, bridge.tokenizer)
        return StreamAnswer(stream, writer) if body.stream else WholeAnswer(stream, writer)

    return [Route("/v1/responses", responses, methods=["POST"])]


async def _submit(door: Door, bridge: Bridge, call: Call, body: ResponseBody, num_bytes: int) -> Stream:
    params = body.params(door.limits)
    check_limits(params, 1, door.limits)
    messages = body.messages()
    with call.span("tokenize"):
        token_ids = await digest(num_bytes, partial(_prompt_ids, bridge, messages))
    with call.span("grammar"):
        spec = body.grammar()
        grammar = None if spec is None else await bridge.grammars.compile(spec)
    prompts = [Prompt(token_ids, params, grammar)]
    check_total(prompts, bridge.limits.max_context, door.limits)
    return bridge.submit(prompts, call, salt=body.cache_salt or "", priority=body.priority or 0)


def _prompt_ids(bridge: Bridge, messages: Sequence[Message]) -> list[int]:
    return bridge.tokenizer.apply_chat_template(messages, max_tokens=bridge.limits.max_context)

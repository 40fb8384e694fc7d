"""POST /v1/chat/completions (lines run per request)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .answer import StreamAnswer, WholeAnswer
from .answer_chat import ChatWriter
from .bridge import Bridge, Prompt
from .call import call_of
from .door import Door
from .server_body import digest, read_body
from .tool_offer import OfferedTools, answer_grammar
from .tool_prompt import for_template
from .wire import check_stream, renamed
from .wire_chat import ChatBody, turns_of
from .wire_limits import check_limits, check_total


def chat_routes(door: Door) -> list[Route]:
    async def chat(request: Request) -> Response:
        call = call_of(request)
        door.check_room()
        body, num_bytes = await read_body(request, door, ChatBody)
        bridge = door.find(body.model)
        check_stream(body.stream, body.stream_options)
        call.wants_timings = bool(body.timings)
        params = body.params(door.limits)
        check_limits(params, 1, door.limits)
        use = body.tool_use(door.limits)
        tools = None if use is None else OfferedTools(use, bridge.tokenizer)
        spec = await digest(num_bytes, partial(answer_grammar, body.grammar, tools, door.limits))
        with call.span("tokenize"):
            token_ids = await digest(num_bytes, partial(_prompt_ids, bridge, body, tools))
        grammar = None
        if spec is not None:
            with call.span("grammar"):
                grammar = await bridge.grammars.compile(spec)
        if tools is not None and tools.special_ids:  # the marks of calls must show
            params = replace(params, skip_special_tokens=False)
        prompts = [Prompt(token_ids, params, grammar)]
        with renamed(body.names):
            check_total(prompts, bridge.limits.max_context, door.limits)
            stream = bridge.submit(prompts, call, salt=body.cache_salt or "", priority=body.priority or 0)
        writer = ChatWriter(door.head("chatcmpl-"), body, params.n, bridge.tokenizer, tools)
        return StreamAnswer(stream, writer) if body.stream else WholeAnswer(stream, writer)

    return [Route("/v1/chat/completions", chat, methods=["POST"])]


def _prompt_ids(bridge: Bridge, body: ChatBody, tools: OfferedTools | None) -> list[int]:
    tokenizer = bridge.tokenizer
    offered = () if tools is None else tools.for_template
    messages, shown = for_template(tokenizer.tool_style, turns_of(body.messages), offered)
    return tokenizer.apply_chat_template(
        messages,
        body.add_generation_prompt is not False,
        shown,
        continues_last=bool(body.continue_final_message),
        variables=body.template_variables(),
        max_tokens=bridge.limits.max_context,
    )

"""Fields that are known and not served: OpenAI's, vLLM's, and those that only another endpoint has (read per request).

One table for all bodies; a body's own fields go before it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Unserved(NamedTuple):
    """A field that is refused, unless its value asks for nothing."""

    neutral: tuple[object, ...] = ()  # values that do; null always does
    instead: tuple[str, ...] = ()  # what to send: the first whose field the body has
    elsewhere: str = ""  # where it has none of them

    def asks_for_nothing(self, value: object) -> bool:
        # 0 == False: the type must agree too.
        return value is None or any(type(value) is type(other) and value == other for other in self.neutral)

    def advice(self, fields: Collection[str]) -> str:
        """What to do about it, where a body has these `fields`."""
        found = [text for text in self.instead if re.split(r"\W", text)[0] in fields]
        other = found[0] if found else self.elsewhere
        return f"send {other}" if other else "leave it out"


LEFT_OUT = Unserved()
_OFF = Unserved((False,))

UNSERVED: Mapping[str, Unserved] = {
    # OpenAI's, served nowhere
    **dict.fromkeys(
        (
            *("access_programs", "audio", "background_options", "image", "max_tool_calls", "moderation", "prediction"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "web_search_options"),
        ),
        LEFT_OUT,
    ),
    "background": _OFF,
    "context_management": Unserved(([],)),
    "conversation": Unserved((), ("input", "messages")),
    "function_call": Unserved(("none",), ("tool_choice",)),
    "functions": Unserved(([],), ("tools",)),
    "modalities": Unserved((["text"],)),
    "previous_response_id": Unserved((), ("input", "messages")),
    "reasoning": Unserved(({}, {"effort": None}, {"effort": "none"})),
    "reasoning_effort": Unserved(("none",)),
    "safety_identifier": Unserved((), ("user",)),
    "service_tier": Unserved(("auto", "default")),
    "store": _OFF,
    "suffix": LEFT_OUT,
    "verbosity": Unserved(("medium",)),
    # vLLM's, served nowhere
    **dict.fromkeys(
        (
            *("allowed_token_ids", "ec_transfer_params", "kv_transfer_params", "logprob_token_ids", "media_io_kwargs"),
            *("mm_payload", "mm_processor_kwargs", "previous_input_messages", "repetition_detection", "session_id"),
            *("stream_interval", "structural_tag", "thinking_token_budget", "trace_decode_token_ids", "vllm_xargs"),
            *("truncate_prompt_tokens", "truncation_side", "watermarking", "guided_decoding_backend"),
            *("chat_template", "guided_whitespace_pattern"),  # a caller's template would run on this server
        ),
        LEFT_OUT,
    ),
    **dict.fromkeys(
        (
            *("enable_response_messages", "return_mm_kwargs", "return_prompt_text", "return_token_ids"),
            *("return_token_offsets", "return_tokens_as_token_ids", "use_beam_search"),
        ),
        _OFF,
    ),
    **{
        f"guided_{kind}": Unserved((), (f"structured_outputs.{kind}",), "structured_outputs to /v1/chat/completions")
        for kind in ("choice", "grammar", "regex")
    },
    "guided_json": Unserved((), ("structured_outputs.json", "text.format")),
    "bad_words": Unserved(([],)),
    "documents": Unserved(([],), ("messages", "prompt", "input")),
    "include_reasoning": Unserved((True,)),
    "length_penalty": Unserved((1.0, 1)),
    "logits_processors": Unserved(([],)),
    "prompt_embeds": Unserved((), ("prompt", "messages", "input")),
    "prompt_logprobs": Unserved((), elsewhere="echo and logprobs to /v1/completions"),
    "request_id": Unserved((), elsewhere="the header x-request-id"),
    "routed_experts_prompt_start": Unserved((0,)),
    "spaces_between_special_tokens": Unserved((True,)),
    # served by some endpoint
    "add_generation_prompt": Unserved((True,)),
    "add_special_tokens": LEFT_OUT,
    "best_of": Unserved((1,)),
    "chat_template_kwargs": Unserved(({},)),
    "continue_final_message": _OFF,
    "echo": _OFF,
    "include": Unserved(([],), ("logprobs",)),
    "input": Unserved((), ("messages", "prompt")),
    "instructions": Unserved((), ("messages", "prompt")),
    "logprobs": Unserved((False,), ('include ["message.output_text.logprobs"]',)),
    "max_completion_tokens": Unserved((), ("max_tokens", "max_output_tokens")),
    "max_output_tokens": Unserved((), ("max_completion_tokens", "max_tokens")),
    "max_tokens": Unserved((), ("max_output_tokens",)),
    "messages": Unserved((), ("input", "prompt")),
    "metadata": Unserved(({},)),
    "n": Unserved((1,)),
    "parallel_tool_calls": Unserved((True, False)),
    "prompt": Unserved((), ("messages", "input")),
    "response_format": Unserved(({"type": "text"},), ("text.format",)),
    "return_token_strs": _OFF,
    "structured_outputs": Unserved((), ("text.format",)),
    "text": Unserved(({}, {"format": {"type": "text"}}), ("response_format",)),
    "tokens": Unserved((), ("prompt", "messages", "input")),
    "tool_choice": Unserved(("none",)),
    "tools": Unserved(([],)),
    "top_logprobs": Unserved((0,), ("logprobs",)),
    "truncation": Unserved(("disabled",)),
}

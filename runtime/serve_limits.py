"""Every bound on what a caller may send or hold, in one table that /info shows (read once at start)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ostinato.engines.errors import RecipeError
from ostinato.engines.sizes import MAX_LOGIT_BIAS, MAX_LOGPROBS

from .request import MAX_N, MAX_STOP_CHARS, MAX_STOPS

KIB, MIB = 2**10, 2**20
_ENGINE = {  # what no server can raise
    "max_stops": MAX_STOPS,
    "max_stop_chars": MAX_STOP_CHARS,
    "max_logprobs": MAX_LOGPROBS,
    "max_top_logprobs": MAX_LOGPROBS,
    "max_logit_bias": MAX_LOGIT_BIAS,
}
_POSITIVE = ("max_rows_per_tenant", "requests_per_minute_per_key", "beat_seconds")  # with 0 nothing would go on


@dataclass(frozen=True)
class ServeLimits:
    """Defaults of one server; None: no bound. What exceeds one is refused with the status beside it."""

    max_body_bytes: int = 8 * MIB  # 413
    body_seconds: float = 30.0  # 408
    max_arriving_bytes: int = 128 * MIB  # of all bodies that are on their way; 503
    max_connections: int = 1024  # on each port; 503
    max_headers: int = 100  # 431
    max_head_bytes: int = 16 * KIB  # 431
    max_request_line_bytes: int = 8 * KIB  # 431
    head_seconds: float = 10.0  # 408
    max_json_depth: int = 64  # 400, as all up to the grammars
    max_json_objects: int = 32 * KIB
    max_messages: int = 4096
    max_prompts: int = 64
    max_choices: int = MAX_N  # n, best_of, and prompts * n
    max_total_tokens: int | None = None  # choices * max_tokens
    max_stops: int = MAX_STOPS
    max_stop_chars: int = MAX_STOP_CHARS
    max_logprobs: int = 5  # of completions
    max_top_logprobs: int = MAX_LOGPROBS  # of chats
    max_logit_bias: int = MAX_LOGIT_BIAS
    max_tools: int = 128
    max_tokenize_chars: int = 1 * MIB
    max_detokenize_tokens: int = 256 * KIB
    max_grammar_bytes: int = 64 * KIB
    max_schema_depth: int = 32
    max_regex_bytes: int = 4 * KIB
    compile_seconds: float = 2.0
    compile_bytes: int = 256 * MIB
    grammar_cache_bytes: int = 256 * MIB
    max_waiting: int = 512  # choices; 429
    wait_seconds: float = 30.0  # in the queue; 503
    max_rows_per_tenant: int | None = None  # of one step; whose tenant has as many waits
    max_concurrent_per_key: int = 64  # calls; 429
    requests_per_minute_per_key: int | None = None  # 429
    request_seconds: float = 600.0  # an error event, or 408 before it began
    beat_seconds: float = 10.0  # between comments in a silent stream
    max_unread_bytes: int = 1 * MIB  # a slower reader is dropped
    unread_seconds: float = 30.0
    drain_seconds: float = 30.0  # 503 for what is new

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value == 0 and name in _POSITIVE:
                raise RecipeError(f"limits.{name} is 0, with which nothing would go on: give more")
            if value is not None and not 0 <= value < math.inf:
                raise RecipeError(f"limits.{name} is {value}: give 0 or more")
            if value is not None and value > (most := _ENGINE.get(name, math.inf)):
                raise RecipeError(f"limits.{name} is {value}, an engine takes {most}: give that or less")

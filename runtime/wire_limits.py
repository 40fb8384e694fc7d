"""The server's own bounds on what one call may ask for (checked per request, before anything is queued)."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.engines.errors import RequestError

from .bridge import Prompt
from .request import SamplingParams
from .serve_limits import ServeLimits


def check_limits(params: SamplingParams, num_prompts: int, limits: ServeLimits) -> None:
    """RequestError names the field that exceeds a bound; what the engine itself can't do is refused by the params."""
    if num_prompts * params.n > limits.max_choices:
        raise RequestError(
            f"{num_prompts} prompts with {params.n} choices each: ask for {limits.max_choices} choices or fewer",
            param="n",
        )
    if len(params.stop) > limits.max_stops:
        raise RequestError(f"stop has {len(params.stop)} strings, at most {limits.max_stops} are allowed", param="stop")
    if any(len(text) > limits.max_stop_chars for text in params.stop):
        raise RequestError(f"a stop string exceeds {limits.max_stop_chars} characters", param="stop")
    if len(params.logit_bias) > limits.max_logit_bias:
        raise RequestError(
            f"logit_bias has {len(params.logit_bias)} entries, at most {limits.max_logit_bias} are allowed",
            param="logit_bias",
        )


def check_total(prompts: Sequence[Prompt], max_context: int, limits: ServeLimits) -> None:
    """RequestError where all choices together may make more tokens than allowed; unset means the rest of a context."""
    if limits.max_total_tokens is None:
        return
    total = 0
    for token_ids, params, *_ in prompts:
        rest = max(0, max_context - len(token_ids))
        total += params.n * (rest if params.max_tokens is None else params.max_tokens)
    if total > limits.max_total_tokens:
        raise RequestError(
            f"all choices together may have {total} tokens, at most {limits.max_total_tokens} are allowed: "
            "lower max_tokens or n",
            param="max_tokens",
        )

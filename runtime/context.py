"""How long a request may be: prompt and output must fit the context (called per request)."""

from __future__ import annotations

from ostinato.engines.errors import RequestError
from ostinato.engines.sizes import Limits


def check_fits(num_prompt: int, max_tokens: int | None, limits: Limits) -> int:
    """The number of output tokens a request may have; RequestError if it could never fit the context.

    `max_tokens` None means the rest of the context. Limits keep a context within the KV pool, so what passes here
    can always run to its end, if need be alone.
    """
    code = "context_length_exceeded"
    if num_prompt >= limits.max_context:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, the context holds {limits.max_context} with at least one of output: "
            "shorten the prompt",
            param="prompt",
            code=code,
        )
    rest = limits.max_context - num_prompt
    if max_tokens is not None and max_tokens > rest:
        raise RequestError(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, the context holds "
            f"{limits.max_context}: give max_tokens {rest} or less, or shorten the prompt",
            param="max_tokens",
            code=code,
        )
    return rest if max_tokens is None else max_tokens

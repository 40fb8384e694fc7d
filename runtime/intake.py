"""From a prompt and its parameters to requests, one per choice, checked so that each can be served (per request)."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field

from ostinato.engines.errors import RequestError
from ostinato.engines.manifest import Manifest
from ostinato.engines.sizes import Limits

from .context import check_fits
from .grammar_guide import Grammar
from .request import SEED_BITS, Request, SamplingParams, check_token_ids


@dataclass(frozen=True)
class Intake:
    """Makes requests for one engine. Ids are always fresh: a client's own id never names a request inside."""

    vocab_size: int
    eos_ids: frozenset[int]
    limits: Limits
    ids: itertools.count[int] = field(default_factory=itertools.count)
    jump_ahead: bool = False

    @classmethod
    def for_bundle(cls, manifest: Manifest, limits: Limits, *, jump_ahead: bool = False) -> Intake:
        return cls(manifest.sizes.vocab_size, frozenset(manifest.eos_ids), limits, jump_ahead=jump_ahead)

    def requests(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        salt: str = "",
        priority: int = 0,
        grammar: Grammar | None = None,
    ) -> list[Request]:
        """`params.n` requests for one prompt. Raises RequestError where the prompt or a parameter is not servable.

        Tokens that a grammar forces are not sampled where steps follow one another and nobody asks for logprobs.
        """
        if not prompt_ids:
            raise RequestError("the prompt has no tokens: give at least one", param="prompt")
        max_tokens = check_fits(len(prompt_ids), params.max_tokens, self.limits)  # first, so that the others are short
        _check_room(params.min_tokens, max_tokens)
        check_token_ids("prompt", prompt_ids, self.vocab_size)
        check_token_ids("stop_token_ids", params.stop_token_ids, self.vocab_size)
        check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], self.vocab_size)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        jumps = self.jump_ahead and params.logprobs is None
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed % 2**SEED_BITS
        return [
            Request(
                id=next(self.ids),
                tokens=list(prompt_ids),
                num_prompt=len(prompt_ids),
                params=params,
                max_tokens=max_tokens,
                seed=seed,
                choice=choice,
                salt=salt,
                priority=priority,
                stop_ids=stop_ids,
                guide=None if grammar is None else grammar.start(jumps=jumps),
            )
            for choice in range(params.n)
        ]


def _check_room(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {min_tokens}, the context has room for {max_tokens}: give less", param="min_tokens"
        )

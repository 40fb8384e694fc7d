"""The body of /v1/completions: prompts and its own fields (lines run per request)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ostinato.engines.errors import RequestError

from .request import SamplingParams
from .serve_limits import ServeLimits
from .wire import SamplingBody, sampling_params
from .wire_grammar import GrammarFields

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionBody(SamplingBody, GrammarFields):
    """A call of /v1/completions. `prompt`: a text, token ids, or a list of either."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None  # so many choices are made, the n with the best mean logprob a token are answered

    def prompts(self, limits: ServeLimits) -> list[str | list[int]]:
        """One entry a prompt. RequestError where `prompt` is none of the four forms."""
        given = self.prompt
        entries = [given] if isinstance(given, str) or _are_ids(given) else given
        if not isinstance(entries, list) or not all(isinstance(entry, str) or _are_ids(entry) for entry in entries):
            raise RequestError(
                "prompt is none of: a string, a list of strings, a list of token ids, a list of such lists",
                param="prompt",
                code="invalid_type",
            )
        if not 0 < len(entries) <= limits.max_prompts:
            raise RequestError(f"prompt lists {len(entries)} prompts: give 1 to {limits.max_prompts}", param="prompt")
        if len({type(entry) for entry in entries}) > 1:
            raise RequestError("prompt mixes texts and token ids: give one kind", param="prompt", code="invalid_type")
        return entries

    @property
    def is_ranked(self) -> bool:
        """Whether more choices are made than answered."""
        return self.best_of is not None and self.best_of != (self.n or 1)

    def params(self, limits: ServeLimits) -> SamplingParams:
        """Sampling parameters, n being all that are made; RequestError where a value is out of range."""
        self._check_best_of(limits)
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens 0 gives nothing without echo: give 1 or more", param="max_tokens")
        if self.logprobs is not None and not 0 <= self.logprobs <= limits.max_logprobs:
            raise RequestError(f"logprobs is out of range: give 0 to {limits.max_logprobs}", param="logprobs")
        params = sampling_params(
            self,
            max_tokens=max_tokens,
            logprobs=0 if self.logprobs is None and self.is_ranked else self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )
        return params if self.best_of is None else replace(params, n=self.best_of)

    def _check_best_of(self, limits: ServeLimits) -> None:
        if self.best_of is None:
            return
        if not (self.n or 1) <= self.best_of <= limits.max_choices:
            raise RequestError(f"best_of is {self.best_of}: give n to {limits.max_choices}", param="best_of")
        if self.stream and self.is_ranked:
            raise RequestError(
                "a stream can't wait for the best of its choices: leave best_of or stream out", param="best_of"
            )


def _are_ids(value: object) -> bool:
    """A non-empty list of integers; true and false are not integers here."""
    return isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)

"""The body of /v1/completions: prompts and its own fields (lines run per request)."""

from __future__ import annotations

from typing import Any

from ostinato.engines.errors import RequestError

from .request import SamplingParams
from .wire import SamplingBody, sampling_params

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_LEGACY_LOGPROBS = 5  # OpenAI's
MAX_PROMPTS = 64


class CompletionBody(SamplingBody):
    """A call of /v1/completions. `prompt`: a text, token ids, or a list of either."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Any = None

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt. RequestError where `prompt` is none of the four forms."""
        given = self.prompt
        entries = [given] if isinstance(given, str) or _are_ids(given) else given
        if not isinstance(entries, list) or not all(isinstance(entry, str) or _are_ids(entry) for entry in entries):
            raise RequestError(
                "prompt is none of: a string, a list of strings, a list of token ids, a list of such lists",
                param="prompt",
                code="invalid_type",
            )
        if not 0 < len(entries) <= MAX_PROMPTS:
            raise RequestError(f"prompt lists {len(entries)} prompts: give 1 to {MAX_PROMPTS}", param="prompt")
        if len({type(entry) for entry in entries}) > 1:
            raise RequestError("prompt mixes texts and token ids: give one kind", param="prompt", code="invalid_type")
        return entries

    def params(self) -> SamplingParams:
        """Sampling parameters; RequestError where a field is not served or a value is out of range."""
        if self.suffix is not None:
            raise RequestError(
                "suffix is not supported here: leave it out", param="suffix", code="unsupported_parameter"
            )
        if self.best_of is not None and self.best_of != 1:
            raise RequestError(
                "best_of above 1 is not supported here: use n", param="best_of", code="unsupported_parameter"
            )
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens 0 gives nothing without echo: give 1 or more", param="max_tokens")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LEGACY_LOGPROBS:
            raise RequestError(f"logprobs is out of range: give 0 to {MAX_LEGACY_LOGPROBS}", param="logprobs")
        return sampling_params(
            self,
            max_tokens=max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


def _are_ids(value: object) -> bool:
    """A non-empty list of integers; true and false are not integers here."""
    return isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)

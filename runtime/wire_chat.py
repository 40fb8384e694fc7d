"""The body of /v1/chat/completions: messages and its own fields (lines run per request)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, FailFast, Field, model_validator

from ostinato.engines.errors import RequestError
from ostinato.engines.sizes import MAX_LOGPROBS

from .request import SamplingParams
from .wire import SamplingBody, WireModel, sampling_params

MAX_MESSAGES = 4096


class TextPart(WireModel):
    """The one kind of content part that is served."""

    type: Literal["text"]
    text: str


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("give a string or a list of text parts")
    return value


class Message(WireModel):
    """A turn. Null and empty fields, as OpenAI's clients send an assistant's turn back, count as absent."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], FailFast(), BeforeValidator(_as_parts)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_lists(cls, table: object) -> object:
        if not isinstance(table, dict):
            return table
        return {name: value for name, value in table.items() if value != [] or name == "content"}

    def for_template(self) -> dict[str, str]:
        """What a chat template reads: text parts joined, developer by its older name."""
        role = "system" if self.role == "developer" else self.role
        turn = {"role": role, "content": "".join(part.text for part in self.content)}
        return turn if self.name is None else {**turn, "name": self.name}


class ChatBody(SamplingBody):
    """A call of /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def params(self) -> SamplingParams:
        """Sampling parameters; RequestError where fields contradict each other or a value is out of range."""
        caps = {cap for cap in (self.max_tokens, self.max_completion_tokens) if cap is not None}
        if len(caps) > 1:
            raise RequestError(
                "max_tokens and max_completion_tokens differ: give one of them", param="max_completion_tokens"
            )
        if 0 in caps:
            raise RequestError("a chat answer needs at least one token: give max_tokens 1 or more", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs true", param="top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise RequestError(f"top_logprobs is out of range: give 0 to {MAX_LOGPROBS}", param="top_logprobs")
        return sampling_params(
            self,
            max_tokens=caps.pop() if caps else None,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=None,
        )

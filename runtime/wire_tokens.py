"""The bodies of /tokenize and /detokenize, in vLLM's shapes (lines run per request)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from ostinato.engines.errors import RequestError

from .serve_limits import ServeLimits
from .wire import WireModel
from .wire_chat import Message
from .wire_unserved import UNSERVED, Unserved


class TokenizeBody(WireModel):
    """A text, or a conversation as the chat template writes it, to be counted and cut into tokens."""

    unserved: ClassVar[Mapping[str, Unserved]] = UNSERVED

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FailFast()] = Field(default_factory=list)
    add_special_tokens: bool | None = None  # of a text, true where unset; a template writes its own
    add_generation_prompt: bool | None = None  # of a conversation, true where unset
    return_token_strs: bool | None = None

    def check(self, limits: ServeLimits) -> None:
        """RequestError where it is not one of the two, has a field of the other, or is too long."""
        if (self.prompt is None) != bool(self.messages):
            raise RequestError("give prompt or messages, one of them", param="prompt")
        other = "add_special_tokens" if self.prompt is None else "add_generation_prompt"
        if getattr(self, other) is not None:
            kind = "messages" if self.prompt is None else "a prompt"
            raise RequestError(f"{other} has no meaning for {kind}: leave it out", param=other)
        if self.prompt is not None and len(self.prompt) > limits.max_tokenize_chars:
            raise RequestError(f"prompt exceeds {limits.max_tokenize_chars} characters: send less", param="prompt")


class DetokenizeBody(WireModel):
    """Token ids to be a text again, special tokens included."""

    unserved: ClassVar[Mapping[str, Unserved]] = UNSERVED

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]

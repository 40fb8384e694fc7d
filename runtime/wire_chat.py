"""The body of /v1/chat/completions: messages and its own fields (lines run per request)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, model_validator

from ostinato.engines.errors import RequestError

from .request import SamplingParams
from .serve_limits import ServeLimits
from .wire import SamplingBody, WireModel, check_size, check_top_logprobs, plain_turn, sampling_params
from .wire_grammar import GrammarFields
from .wire_tools import ToolCall, ToolFields
from .wire_unserved import LEFT_OUT, Unserved

_UNSERVED_PARTS = ("image_url", "input_audio", "file", "refusal", "video_url", "audio_url", "image")


class TextPart(WireModel):
    """The one kind of content part that is served."""

    unserved: ClassVar[Mapping[str, Unserved]] = dict.fromkeys((*_UNSERVED_PARTS, "prompt_cache_breakpoint"), LEFT_OUT)

    type: Literal["text"]
    text: str


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("give a string or a list of text parts")
    for part in value:
        if isinstance(part, dict) and (kind := part.get("type")) in _UNSERVED_PARTS:
            raise ValueError(f"parts of type {kind} are not supported here: send text parts")
    return value


class Message(WireModel):
    """A turn. Null and empty fields, as OpenAI's clients send an assistant's turn back, count as absent."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **dict.fromkeys(("annotations", "audio", "refusal", "tools"), LEFT_OUT),
        "function_call": Unserved((), ("tool_calls",)),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], FailFast(), BeforeValidator(_as_parts)] = Field(default_factory=list)
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FailFast()] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, table: object) -> object:
        """Empty lists, too: it stands in for the one of all models."""
        if not isinstance(table, dict):
            return table
        check_size(table)
        return {
            name: value for name, value in table.items() if value is not None and (value != [] or name == "content")
        }

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a message of role tool, and no other, has the tool_call_id that it answers")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content is missing: give a string or a list of text parts")
        return self

    def for_template(self, names: Mapping[str, str]) -> dict[str, Any]:
        """What a chat template reads, with arguments as values.

        `names`: of called functions by the call's id; some templates want a result to have one.
        """
        turn = plain_turn(self.role, self.content)
        if (name := self.name or names.get(self.tool_call_id or "")) is not None:
            turn["name"] = name
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as a chat template reads it."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls}
    return [message.for_template(names) for message in messages]


class TemplateKwargs(WireModel):
    """The variables of a chat template that a caller may set; any other could be one that this template has."""

    is_closed: ClassVar[bool] = True

    enable_thinking: bool | None = None


class ChatBody(SamplingBody, GrammarFields, ToolFields):
    """A call of /v1/chat/completions; the last three fields are not OpenAI's."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    @property
    def names(self) -> Mapping[str, str]:
        """What errors call a field by, where this body has another name for it."""
        cap = "max_completion_tokens" if self.max_tokens is None else "max_tokens"
        return {"prompt": "messages", "max_tokens": cap}

    def params(self, limits: ServeLimits) -> SamplingParams:
        """Sampling parameters; RequestError where fields contradict each other or a value is out of range."""
        caps = {cap for cap in (self.max_tokens, self.max_completion_tokens) if cap is not None}
        if len(caps) > 1:
            raise RequestError(
                "max_tokens and max_completion_tokens differ: give one of them", param="max_completion_tokens"
            )
        if caps and min(caps) < 1:
            name = self.names["max_tokens"]
            raise RequestError(f"a chat answer needs at least one token: give {name} 1 or more", param=name)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs true", param="top_logprobs")
        check_top_logprobs(self.top_logprobs, limits)
        self._check_ending()
        return sampling_params(
            self,
            max_tokens=caps.pop() if caps else None,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def template_variables(self) -> dict[str, Any]:
        """What a chat template gets besides the messages."""
        return {} if self.chat_template_kwargs is None else self.chat_template_kwargs.model_dump(exclude_none=True)

    def _check_ending(self) -> None:
        if not self.continue_final_message:
            return
        if self.add_generation_prompt is not False:
            raise RequestError(
                "continue_final_message needs add_generation_prompt false: a new turn would begin",
                param="continue_final_message",
            )
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls:
            raise RequestError(
                "continue_final_message needs a last message of the assistant without tool_calls",
                param="continue_final_message",
            )

"""The body of /v1/responses: input items, text format and its own fields (lines run per request).

Nothing is stored: each call brings its whole conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, FailFast, Field, StringConstraints, model_validator

from ostinato.engines.errors import RequestError

from .grammar_spec import GrammarSpec
from .request import SamplingParams
from .serve_limits import ServeLimits
from .wire import Name, SamplingFields, WireModel, check_stream, check_top_logprobs, plain_turn, sampling_params

INCLUDE_LOGPROBS = "message.output_text.logprobs"

# Fields of OpenAI's that are not served: name -> the values that ask for nothing.
UNSERVED: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning": ({}, {"effort": None}, {"effort": "none"}),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


_UNSERVED_ITEMS = ("function_call", "function_call_output", "item_reference", "reasoning", "custom_tool_call")


class InputText(WireModel):
    """Text of a turn; what came with an answer that is sent back is not read."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("give a string or a list of text parts")
    return value


class InputMessage(WireModel):
    """A turn of the conversation, or an answer's message sent back."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[InputText], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[InputText])
    ]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_served(cls, item: object) -> object:
        if isinstance(item, dict) and (kind := item.get("type")) in _UNSERVED_ITEMS:
            raise ValueError(f"items of type {kind} are not supported here: send messages")
        return item


def _as_items(value: object) -> object:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("give a string or a list of messages")
    return value


class TextFormat(WireModel):
    """What the text must be: anything, a JSON object, or JSON of a schema, which is kept to whatever `strict` says."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    description: str | None = None

    @model_validator(mode="after")
    def _fits_its_type(self) -> TextFormat:
        needed = {"name": self.name, "schema": self.schema_} if self.type == "json_schema" else {}
        if missing := [name for name, value in needed.items() if value is None]:
            raise ValueError(f"json_schema needs {' and '.join(missing)}")
        others = [self.name, self.schema_, self.strict, self.description]
        if self.type != "json_schema" and any(value is not None for value in others):
            raise ValueError(f"{self.type} takes no other field: leave name, schema, strict and description out")
        return self

    def spec(self) -> GrammarSpec | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return GrammarSpec("json_object", "", "text.format")
            case "json_schema":
                return GrammarSpec("json_schema", orjson.dumps(self.schema_).decode(), "text.format")


class TextConfig(WireModel):
    """How the answer's text is made."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(WireModel):
    """There is no obfuscation, so only its absence may be asked for."""

    include_obfuscation: Literal[False] | None = None


Label = Annotated[str, StringConstraints(max_length=64)]
Note = Annotated[str, StringConstraints(max_length=512)]


class ResponseBody(SamplingFields):
    """A call of /v1/responses."""

    unserved: ClassVar[Mapping[str, tuple[object, ...]]] = UNSERVED

    input: Annotated[
        list[InputMessage],
        FailFast(),
        BeforeValidator(_as_items, json_schema_input_type=str | Annotated[list[InputMessage], Field(min_length=1)]),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextConfig | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], FailFast(), Field(max_length=8)] = Field(
        default=[]
    )
    top_logprobs: int | None = None
    metadata: Annotated[dict[Label, Note], Field(max_length=16)] = Field(default={})
    truncation: Literal["disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None

    @property
    def has_logprobs(self) -> bool:
        return INCLUDE_LOGPROBS in self.include

    def messages(self) -> list[dict[str, Any]]:
        """The conversation for the chat template; RequestError where it is empty."""
        if not self.input:
            raise RequestError("input has no items: give one or more", param="input")
        told = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*told, *(plain_turn(item.role, item.content) for item in self.input)]

    def grammar(self) -> GrammarSpec | None:
        return None if self.text is None or self.text.format is None else self.text.format.spec()

    def params(self, limits: ServeLimits) -> SamplingParams:
        """Sampling parameters; RequestError where fields contradict each other or a value is out of range."""
        check_stream(self.stream, self.stream_options)
        check_top_logprobs(self.top_logprobs, limits)
        if self.top_logprobs and not self.has_logprobs:
            raise RequestError(f"top_logprobs needs {INCLUDE_LOGPROBS} in include", param="top_logprobs")
        return sampling_params(
            self,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.has_logprobs else None,
        )

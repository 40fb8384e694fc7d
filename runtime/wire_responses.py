"""The body of /v1/responses: text format and its own fields (lines run per request).

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
from .wire import Name, SamplingFields, WireModel, check_stream, check_top_logprobs, sampling_params
from .wire_flat_tools import FlatToolFields
from .wire_items import InputItem, turns_of
from .wire_unserved import LEFT_OUT, Unserved

INCLUDE_LOGPROBS = "message.output_text.logprobs"


def _as_items(value: object) -> object:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("give a string or a list of items")
    return value


class TextFormat(WireModel):
    """What the text must be: anything, a JSON object, or JSON of a schema, which is kept to whatever `strict` says."""

    unserved: ClassVar[Mapping[str, Unserved]] = {"json_schema": Unserved(elsewhere="name and schema")}

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

    unserved: ClassVar[Mapping[str, Unserved]] = dict.fromkeys(("include_usage", "continuous_usage_stats"), LEFT_OUT)

    include_obfuscation: Literal[False] | None = None


Label = Annotated[str, StringConstraints(max_length=64)]
Note = Annotated[str, StringConstraints(max_length=512)]


class ResponseBody(SamplingFields, FlatToolFields):
    """A call of /v1/responses."""

    input: Annotated[
        list[InputItem],
        FailFast(),
        BeforeValidator(_as_items, json_schema_input_type=str | Annotated[list[InputItem], Field(min_length=1)]),
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
        return [*told, *turns_of(self.input)]

    @property
    def names(self) -> Mapping[str, str]:
        """What errors call a field by, where this body has another name for it."""
        return {"max_tokens": "max_output_tokens", "prompt": "input", "messages": "input", **self.names_in_tools}

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

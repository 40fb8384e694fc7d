"""The items of a /v1/responses input: messages, calls of functions and what those gave (lines run per request).

An answer's items may be sent back as they came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, FailFast, Field, Tag, model_validator

from .wire import KIND, Name, WireModel, check_type, plain_turn
from .wire_tools import checked_arguments, parsed_arguments
from .wire_unserved import LEFT_OUT, Unserved

_FOREIGN_TO_TEXT = ("detail", "file_data", "file_id", "file_url", "image_url", "prompt_cache_breakpoint", "refusal")
_FOREIGN_TO_MESSAGE = ("function_call", "name", "phase", "tool_call_id", "tool_calls")  # a chat's, but for one
_FOREIGN_TO_CALL = ("async", "caller", "namespace")

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(WireModel):
    """Text of a turn; what came with an answer that is sent back is not read."""

    unserved: ClassVar[Mapping[str, Unserved]] = dict.fromkeys(_FOREIGN_TO_TEXT, LEFT_OUT)

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


Parts = Annotated[list[InputText], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[InputText])]


class InputMessage(WireModel):
    """A turn of the conversation, or an answer's message sent back."""

    unserved: ClassVar[Mapping[str, Unserved]] = dict.fromkeys(_FOREIGN_TO_MESSAGE, LEFT_OUT)

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    id: str | None = None
    status: Status | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_served(cls, item: object) -> object:
        told = "items of this type are not supported here: send messages and calls of functions"
        return check_type(item, "message", told)


class FunctionCall(WireModel):
    """A call that the model made."""

    unserved: ClassVar[Mapping[str, Unserved]] = dict.fromkeys(_FOREIGN_TO_CALL, LEFT_OUT)

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: Annotated[str, AfterValidator(checked_arguments)]
    id: str | None = None
    status: Status | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, item: object) -> object:
        if isinstance(item, dict) and item.get("status") == "incomplete":
            raise ValueError("this call was cut short: leave it out")
        return item

    def for_template(self) -> dict[str, Any]:
        """As a chat template reads it."""
        function = {"name": self.name, "arguments": parsed_arguments(self.arguments)}
        return {"id": self.call_id, "type": "function", "function": function}


class FunctionCallOutput(WireModel):
    """What a call gave."""

    unserved: ClassVar[Mapping[str, Unserved]] = dict.fromkeys(_FOREIGN_TO_CALL, LEFT_OUT)

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    name: Name | None = None
    id: str | None = None
    status: Status | None = None


def _kind(item: object) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    return KIND + (kind if kind in ("function_call", "function_call_output") else "message")


InputItem = Annotated[
    Annotated[InputMessage, Tag(KIND + "message")]
    | Annotated[FunctionCall, Tag(KIND + "function_call")]
    | Annotated[FunctionCallOutput, Tag(KIND + "function_call_output")],
    Discriminator(_kind),
]


def turns_of(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """The conversation as a chat template reads it: calls belong to the assistant's turn that they follow."""
    turns: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for item in items:
        match item:
            case InputMessage():
                turns.append(plain_turn(item.role, item.content))
            case FunctionCall():
                names[item.call_id] = item.name
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append(plain_turn("assistant", ()))
                turns[-1].setdefault("tool_calls", []).append(item.for_template())
            case FunctionCallOutput():
                turn = plain_turn("tool", item.output) | {"tool_call_id": item.call_id}
                name = item.name or names.get(item.call_id)
                turns.append(turn if name is None else turn | {"name": name})
    return turns

"""Tools in the body of /v1/chat/completions: what is offered, what must be called, calls of earlier turns (per call).

As OpenAI has it: without tool_choice the model may call (auto); a named call ends with finish_reason "stop", any other
with "tool_calls".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import AfterValidator, BeforeValidator, Discriminator, FailFast, Field, Tag

from ostinato.engines.errors import RequestError

from .json_depth import check_shape
from .serve_limits import ServeLimits
from .wire import KIND, Name, WireModel
from .wire_unserved import LEFT_OUT, Unserved

Mode = Literal["auto", "required", "named"]
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
Word = Literal["none", "auto", "required"]
_WORDS = ("none", "auto", "required")
NamedT = TypeVar("NamedT")  # how a body names a function
_MAX_DEPTH, _MAX_OBJECTS = 64, 10_000  # of a call's arguments


def _checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    if schema and schema.get("type") != "object":
        raise ValueError('a function takes an object: give "type": "object"')
    return schema


class Function(WireModel):
    """A function that the model may call. Without `parameters` it takes none."""

    unserved: ClassVar[Mapping[str, Unserved]] = {"defer_loading": Unserved((False,))}

    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_checked_schema)] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> Mapping[str, Any]:
        return self.parameters or NO_ARGUMENTS


class Tool(WireModel):
    """The one kind of tool that is served."""

    unserved: ClassVar[Mapping[str, Unserved]] = {"custom": LEFT_OUT, "defer_loading": Unserved((False,))}

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Whole and in one order of keys, as templates read them; `strict` is the server's affair."""
        function = self.function
        parameters = function.parameters or {"type": "object", "properties": {}}
        table = {"name": function.name, "description": function.description or "", "parameters": parameters}
        return {"type": "function", "function": table}


class NamedFunction(WireModel):
    name: Name


class NamedChoice(WireModel):
    """The tool_choice that names a function."""

    type: Literal["function"]
    function: NamedFunction


def check_choice(value: object, named: str) -> object:
    """Each wrong form told apart: a union's own errors name its members. `named`: how this body names a function."""
    if value in _WORDS:
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        return value
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        raise ValueError("allowed_tools is not supported here: list those tools only, and leave the others out")
    raise ValueError(f'give "none", "auto", "required" or {named}')


def _as_choice(value: object) -> object:
    return check_choice(value, '{"type": "function", "function": {"name": …}}')


def _kind_of_choice(value: object) -> str:
    """Of a union's members, so that faults name the field alone."""
    return KIND + ("word" if isinstance(value, str) else "named")


Choice = Annotated[
    Annotated[Word, Tag(KIND + "word")] | Annotated[NamedT, Tag(KIND + "named")], Discriminator(_kind_of_choice)
]
ToolChoice = Annotated[Choice[NamedChoice], BeforeValidator(_as_choice)]


def checked_arguments(text: str) -> str:
    """The text of a call's arguments; ValueError if it can't be."""
    try:
        check_shape(text.encode(), _MAX_DEPTH, _MAX_OBJECTS)
    except RequestError:
        raise ValueError(
            f"these are nested deeper than {_MAX_DEPTH}, or more than {_MAX_OBJECTS} objects: send flatter ones"
        ) from None
    if not isinstance(parsed_arguments(text), dict):
        raise ValueError("this is not the text of a JSON object: send the arguments as they came")
    return text


def parsed_arguments(text: str) -> Any:
    """The arguments of a call as a value; no text counts as none."""
    try:
        return orjson.loads(text) if text.strip() else {}
    except orjson.JSONDecodeError:
        return None


class CalledFunction(WireModel):
    """What was called."""

    name: Name
    arguments: Annotated[str, AfterValidator(checked_arguments)]


class ToolCall(WireModel):
    """A call of an earlier turn. `index`: left over where a client kept a stream's chunks."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Templates write arguments as JSON in their own way, so they get a value."""
        function = {"name": self.function.name, "arguments": parsed_arguments(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """What a call may do with tools. `name`: the one function that must be called, where `mode` is named."""

    tools: tuple[Tool, ...]
    mode: Mode
    name: str | None = None
    at_most_one: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools)

    @property
    def is_forced(self) -> bool:
        """Whether the output is calls and nothing else."""
        return self.mode != "auto"


class ToolFields(WireModel):
    """The fields of a body that are about tools."""

    tools: Annotated[list[Tool], FailFast()] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def tool_use(self, limits: ServeLimits) -> ToolUse | None:
        """None where the model is to know of no tools. RequestError where the fields contradict each other."""
        choice = self.tool_choice
        word, name = (None, choice.function.name) if isinstance(choice, NamedChoice) else (choice, None)
        return tool_use(self.tools, word, name, self.parallel_tool_calls, limits)


def tool_use(
    offered: Sequence[Tool], word: Word | None, name: str | None, parallel: bool | None, limits: ServeLimits
) -> ToolUse | None:
    """What tools and choice (a word, or a function's name) come to; None where the model is to know of no tools.

    RequestError where they contradict each other.
    """
    tools = tuple(offered)
    if not tools:
        if name is not None or word not in (None, "none"):
            raise RequestError("tool_choice needs tools: list them, or leave it out", param="tool_choice")
        return None
    _check_tools(tools, limits)
    if word == "none":
        return None
    if name is None:
        return ToolUse(tools, word or "auto", at_most_one=parallel is False)
    if name not in {tool.function.name for tool in tools}:
        raise RequestError("tool_choice names a function that tools does not list", param="tool_choice")
    return ToolUse(tools, "named", name, at_most_one=True)


def _check_tools(tools: Sequence[Tool], limits: ServeLimits) -> None:
    if len(tools) > limits.max_tools:
        raise RequestError(f"tools lists {len(tools)}, at most {limits.max_tools} are allowed", param="tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in seen:
            raise RequestError("two tools have this name: give each its own", param=f"tools.{index}.function.name")
        seen.add(tool.function.name)

"""Tools in the body of /v1/responses, where a function's fields lie flat in its tool (lines run per request).

Like in a chat, a function is kept to its schema where it is strict or must be called; `strict` is never assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, model_validator

from .serve_limits import ServeLimits
from .wire import WireModel, check_type
from .wire_tools import Choice, Function, NamedFunction, Tool, ToolUse, check_choice, tool_use
from .wire_unserved import LEFT_OUT, Unserved


class FlatTool(Function):
    """The one kind of tool that is served."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **Function.unserved,
        **dict.fromkeys(("allowed_callers", "function", "output_schema"), LEFT_OUT),
        "async": Unserved((False,)),
    }

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_served(cls, tool: object) -> object:
        return check_type(tool, "function", "only tools of type function are supported here: leave the others out")

    def nested(self) -> Tool:
        """The same in a chat's form."""
        fields = {name: value for name, value in self if name != "type"}
        return Tool.model_construct(type="function", function=Function.model_construct(**fields))


class FlatChoice(NamedFunction):
    """The tool_choice that names a function."""

    type: Literal["function"]


def _as_choice(value: object) -> object:
    return check_choice(value, '{"type": "function", "name": …}')


class FlatToolFields(WireModel):
    """The fields of a body that are about tools."""

    tools: Annotated[list[FlatTool], FailFast()] = Field(default_factory=list)
    tool_choice: Annotated[Choice[FlatChoice], BeforeValidator(_as_choice)] | None = None
    parallel_tool_calls: bool | None = None

    def tool_use(self, limits: ServeLimits) -> ToolUse | None:
        """None where the model is to know of no tools. RequestError where the fields contradict each other."""
        choice = self.tool_choice
        word, name = (None, choice.name) if isinstance(choice, FlatChoice) else (choice, None)
        if word == "auto" and not self.tools:  # as an answer without tools repeats it
            word = None
        return tool_use([tool.nested() for tool in self.tools], word, name, self.parallel_tool_calls, limits)

    @property
    def names_in_tools(self) -> Mapping[str, str]:
        """What a field of a chat's tools is called here."""
        inner = ("name", "parameters")
        return {f"tools.{at}.function.{name}": f"tools.{at}.{name}" for at in range(len(self.tools)) for name in inner}

    def tools_json(self) -> dict[str, Any]:
        """What the answer repeats of these fields."""
        choice = self.tool_choice
        return {
            "tools": [tool.model_dump() for tool in self.tools],
            "tool_choice": choice.model_dump() if isinstance(choice, FlatChoice) else choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
        }

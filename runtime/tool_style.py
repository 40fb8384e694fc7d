"""How a model writes tool calls: read off its chat template once, at start."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class ToolStyle:
    """A call is `opening {"name": …, "arguments": {…}} closing`. Without an opening only a whole output is calls.

    `teller`: who tells the model of tools, the template or a message that is put in; of calls and results likewise.
    `takes_many`: several calls in one turn can be shown.
    """

    name: str
    opening: str
    closing: str
    arguments: str  # the key's name
    joint: str  # between calls
    prefix: str  # a mark that an output of calls may begin with
    teller: Literal["template", "system", "user"]
    takes_many: bool = True

    @property
    def is_native(self) -> bool:
        return self.teller == "template"

    @property
    def begin(self) -> str:
        """The marker alone; space around it is free."""
        return self.opening.strip()

    @property
    def end(self) -> str:
        return self.closing.strip()

    def head(self, name: str) -> str:
        """A call up to its arguments."""
        return f'{self.opening}{{"name": "{name}", "{self.arguments}": '

    @property
    def tail(self) -> str:
        """What follows the arguments."""
        return "}" + self.closing

    def call(self, name: str, arguments: str) -> str:
        return f"{self.head(name)}{arguments}{self.tail}"

    @property
    def label(self) -> str:
        """For people: the style and who tells the model of it."""
        return f"{self.name} ({'template' if self.is_native else f'by a {self.teller} message'})"


HERMES = ToolStyle("hermes", "<tool_call>\n", "\n</tool_call>", "arguments", "\n", "", "template")
LLAMA3 = ToolStyle("llama3", "", "", "parameters", "; ", "<|python_tag|>", "template")
TOLD = replace(HERMES, teller="system")

# Calls within the same tags, but not as JSON.
_NO_JSON = ("<function=", "<arg_key>")


def style_of(template: str) -> ToolStyle:
    """The style that a template's source teaches; TOLD where it teaches none of those that are served."""
    if not re.search(r"\btools\b", template):
        return TOLD
    if "<tool_call>" in template and "arguments" in template and not any(mark in template for mark in _NO_JSON):
        return HERMES
    if "parameters" in template and ("ipython" in template or "<|python_tag|>" in template):
        return LLAMA3
    return TOLD

"""The tools of one call, in the style of the model that is to call them (made per request)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ostinato.engines.errors import RequestError

from .grammar_spec import GrammarSpec
from .serve_limits import ServeLimits
from .tokenizer import Tokenizer
from .tool_calls import ToolCallParser
from .tool_grammar import tool_grammar
from .tool_style import TOLD
from .wire_tools import ToolUse


class OfferedTools:
    """`special_ids`: of the style's marks that are special tokens, which an answer's text would leave out."""

    def __init__(self, use: ToolUse, tokenizer: Tokenizer) -> None:
        self._style = tokenizer.tool_style or TOLD
        self._use = use if self._style.takes_many else replace(use, at_most_one=True)
        ids = {mark: tokenizer.special_id(mark) for mark in (self._style.begin, self._style.end)}
        self.special_ids: Mapping[str, int] = {mark: number for mark, number in ids.items() if number is not None}
        self.for_template: tuple[dict[str, Any], ...] = tuple(tool.for_template() for tool in use.tools)

    def grammar(self, limits: ServeLimits) -> GrammarSpec | None:
        """What the answer must fit, if anything. RequestError names the function whose schema can't be kept."""
        return tool_grammar(self._use, self._style, self.special_ids, limits)

    @property
    def calls_end_by(self) -> str:
        """The finish reason of an answer with calls, as OpenAI has it."""
        return "stop" if self._use.mode == "named" else "tool_calls"

    def new_parser(self) -> ToolCallParser:
        """For one choice."""
        use = self._use
        return ToolCallParser(self._style, use.names, is_forced=use.is_forced, at_most_one=use.at_most_one)


def answer_grammar(
    own_form: Callable[[], GrammarSpec | None], tools: OfferedTools | None, limits: ServeLimits
) -> GrammarSpec | None:
    """What an answer is held to, if anything. RequestError where both its own form and its tools would have a say."""
    form = own_form()
    if tools is None or form is None:
        return form if tools is None else tools.grammar(limits)
    raise RequestError(
        "tools and a form of the whole answer contradict each other: leave one of them out, or set tool_choice to none",
        param=form.param,
    )

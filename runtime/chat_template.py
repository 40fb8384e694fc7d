"""A bundle's chat template: compiled once at start, rendered per request in a sandbox, as transformers does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError

from ostinato.engines.errors import BundleError, RequestError

from .template_bounds import MAX_TEXT_CHARS
from .template_sandbox import TemplateSandbox
from .template_skeleton import Skeletons, only_pastes
from .tool_style import ToolStyle, style_of

TEMPLATE_FILE = "chat_template.jinja"
_TOOL_TEMPLATE = "tool_use"
_CUT = "\ue000mark\ue000"  # private characters: no template trims or changes them

Message = Mapping[str, Any]  # JSON values: role, content, tool_calls, …


class ChatTemplate:
    """Renders messages to prompt text. Safe to use from several threads.

    The template comes with the bundle, never from a caller; its time and the text it makes are bounded. `style`: how
    it teaches tool calls. Raises BundleError where the template does not compile.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sandbox = TemplateSandbox()
        try:
            self._templates = {name: self._sandbox.compiled(source) for name, source in sources.items()}
        except TemplateError as error:
            raise BundleError(
                f"the bundle's chat template does not compile ({error}): mend it in the checkpoint and build again"
            ) from None
        self._special_tokens = dict(special_tokens)
        pastes = only_pastes(self._sandbox.parse(sources["default"]))
        self._skeletons = Skeletons(self._rendered) if pastes else None
        self.style = self._tried_out(style_of(sources.get(_TOOL_TEMPLATE, sources["default"])))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continues_last: bool = False,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text; with `continues_last` it ends inside the last message, which the answer then goes on.

        Raises RequestError `chat_template_error` for whatever goes wrong inside the template.
        """
        if self._skeletons is not None and not (continues_last or tools or variables):
            text = self._skeletons.fill(messages, add_generation_prompt)
            if text is not None:
                return text
        return self._rendered(messages, add_generation_prompt, continues_last, tools, variables)

    def _rendered(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        continues_last: bool = False,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        template = self._templates["default"]
        if tools:
            template = self._templates.get(_TOOL_TEMPLATE, template)
        if continues_last:
            *earlier, last = messages
            messages = [*earlier, {**last, "content": f"{last.get('content') or ''}{_CUT}"}]
        known = {
            **(variables or {}),
            **self._special_tokens,
            # A null field counts as absent: templates ask whether a field is defined.
            "messages": [{key: item for key, item in message.items() if item is not None} for message in messages],
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(template, known)
        return _before_cut(text) if continues_last else text

    def _tried_out(self, style: ToolStyle) -> ToolStyle:
        """Some templates teach calls but refuse a turn with two of them, some take no system message."""
        if style.is_native:
            return replace(style, takes_many=self._shows(_turns_of_calls(2)) or not self._shows(_turns_of_calls(1)))
        asked = {"role": "user", "content": "?"}
        return replace(style, teller="system" if self._shows([{"role": "system", "content": _CUT}, asked]) else "user")

    def _shows(self, messages: Sequence[Message]) -> bool:
        """Whether they render, and what is marked in them with it."""
        try:
            return _CUT in self.render(messages, add_generation_prompt=True)
        except RequestError:
            return False

    def _render(self, template: Template, variables: dict[str, Any]) -> str:
        self._sandbox.begin()
        try:
            return _bounded(template, variables)
        except RequestError:
            raise
        except Exception as error:  # a template can fail in any way that Python code can
            raise _refusal(f"the chat template refused the messages: {type(error).__name__}: {error}") from None


def _turns_of_calls(num_calls: int) -> list[Message]:
    """A question, so many calls in one turn, and their results."""
    calls = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": "f", "arguments": {}}}
        for number in range(num_calls)
    ]
    results = [{"role": "tool", "name": "f", "tool_call_id": call["id"], "content": "1"} for call in calls]
    return [{"role": "user", "content": _CUT}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _bounded(template: Template, variables: dict[str, Any]) -> str:
    parts: list[str] = []
    num_chars = 0
    for part in template.root_render_func(template.new_context(variables)):
        parts.append(part)
        num_chars += len(part)
        if num_chars > MAX_TEXT_CHARS:
            raise _refusal(f"the messages render to more than {MAX_TEXT_CHARS} characters: send less")
    return "".join(parts)


def _before_cut(text: str) -> str:
    before, mark, _ = text.rpartition(_CUT)
    if not mark:
        raise RequestError(
            "the chat template does not print the last message as it is, so it can't be continued: leave "
            "continue_final_message out",
            param="continue_final_message",
            code="chat_template_error",
        )
    return before


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages", code="chat_template_error")


def load_chat_template(folder: Path, config: Mapping[str, Any], tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template in `folder` or in tokenizer_config.json (a text, or a list of named ones), else None."""
    path = folder / TEMPLATE_FILE
    found = path.read_text() if path.is_file() else config.get("chat_template")
    if not found:
        return None
    sources = {"default": found} if isinstance(found, str) else {entry["name"]: entry["template"] for entry in found}
    if "default" not in sources:
        raise BundleError(
            f"{folder} names the chat templates {sorted(sources)}, one must be 'default': mend the checkpoint's "
            "tokenizer_config.json and build again"
        )
    return ChatTemplate(sources, tokens)

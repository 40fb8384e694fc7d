"""A bundle's chat template: compiled once at start, rendered per request in a sandbox, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ostinato.engines.errors import BundleError, RequestError

TEMPLATE_FILE = "chat_template.jinja"
MAX_PROMPT_CHARS = 4 * 2**20
_TOOL_TEMPLATE = "tool_use"

Message = Mapping[str, Any]  # JSON values: role, content, tool_calls, …


class ChatTemplate:
    """Renders messages to prompt text. Safe to use from several threads.

    The template comes with the bundle, never from a caller; range() is limited by the sandbox, the output by
    `MAX_PROMPT_CHARS`. Raises BundleError where the template does not compile.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateError as error:
            raise BundleError(
                f"the bundle's chat template does not compile ({error}): mend it in the checkpoint and build again"
            ) from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[Any] | None) -> str:
        """Prompt text. Raises RequestError `chat_template_error` for whatever goes wrong inside the template."""
        template = self._templates["default"]
        if tools:
            template = self._templates.get(_TOOL_TEMPLATE, template)
        variables = {
            **self._special_tokens,
            # A null field counts as absent: templates ask whether a field is defined.
            "messages": [{key: item for key, item in message.items() if item is not None} for message in messages],
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _bounded(template, variables)
        except RequestError:
            raise
        except Exception as error:  # a template can fail in any way that Python code can
            raise _refusal(f"the chat template refused the messages: {type(error).__name__}: {error}") from None


def _bounded(template: Template, variables: Mapping[str, Any]) -> str:
    parts: list[str] = []
    num_chars = 0
    for part in template.generate(variables):
        parts.append(part)
        num_chars += len(part)
        if num_chars > MAX_PROMPT_CHARS:
            raise _refusal(f"the messages render to more than {MAX_PROMPT_CHARS} characters: send less")
    return "".join(parts)


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


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks a training mask: at inference it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and &, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

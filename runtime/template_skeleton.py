"""What stands around the texts of a conversation, for chat templates that only paste them (kept by its roles).

A template that does nothing with a text but print it prints the same around any text. Which one is so is read off its
syntax tree: all that may lie in one is known here, and anything else makes it an ordinary template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import nodes

from .template_bounds import MAX_TEXT_CHARS

_MAX_KEPT = 256
_MAX_MESSAGES = 64
_MAX_CHARS = 2**16  # of texts; more than that costs its time anyhow
_MARK = "\ue000"  # a private character
_MARKED = re.compile(f"{_MARK}([0-9]+){_MARK}")
_FIELDS = {"role", "content"}
_OF_LOOP = ("first", "last", "index", "index0", "length")  # and nothing that leads to a message
_PLAIN = (nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.If, nodes.Template, nodes.ExprStmt)

Message = Mapping[str, Any]


class Skeletons:
    """Of one template. `render` prints a conversation. Safe to use from several threads."""

    def __init__(self, render: Callable[[Sequence[Message], bool], str]) -> None:
        self._render = render
        self._kept: dict[tuple[bool, tuple[str, ...]], Sequence[str | int]] = {}

    def fill(self, messages: Sequence[Message], add_generation_prompt: bool) -> str | None:
        """The prompt. None for many messages, for some with more than a role and a text, and for a longer prompt than
        the sandbox allows. Raises what `render` does.
        """
        if len(messages) > _MAX_MESSAGES or not all(map(_is_plain, messages)):
            return None
        if sum([len(message["content"]) for message in messages]) > _MAX_CHARS:
            return None
        key = add_generation_prompt, tuple([message["role"] for message in messages])
        if (skeleton := self._kept.get(key)) is None:
            if any(_MARK in role for role in key[1]):
                return None
            skeleton = self._made(*key)
            if len(self._kept) >= _MAX_KEPT:
                self._kept = {}  # who reads the old one may go on
            self._kept[key] = skeleton
        text = "".join([part if isinstance(part, str) else messages[part]["content"] for part in skeleton])
        return text if len(text) <= MAX_TEXT_CHARS else None

    def _made(self, add_generation_prompt: bool, roles: Sequence[str]) -> Sequence[str | int]:
        marked = [{"role": role, "content": f"{_MARK}{number}{_MARK}"} for number, role in enumerate(roles)]
        parts = _MARKED.split(self._render(marked, add_generation_prompt))
        return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def _is_plain(message: Message) -> bool:
    return message.keys() == _FIELDS and type(message["role"]) is type(message["content"]) is str


def only_pastes(template: nodes.Template) -> bool:
    """Whether a template, as the sandbox reads it, prints the content of messages and asks nothing of it."""
    return _Reader().reads(template, is_printed=False)


class _Reader:
    def __init__(self) -> None:
        self._messages: set[str] = set()  # names of loops' messages

    def reads(self, node: nodes.Node, *, is_printed: bool) -> bool:
        """Whether all of a node is known, and no content in it but where it `is_printed`."""
        match node:
            case nodes.TemplateData() | nodes.Const():
                return True
            case nodes.Name(name=name):
                return name not in ("messages", "loop", *self._messages)
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
                return attr in _OF_LOOP
            case nodes.Getattr(attr=field) | nodes.Getitem(arg=nodes.Const(value=field)):
                return self._is_message(node.node) and (field == "role" or (field == "content" and is_printed))
            case nodes.For(target=nodes.Name(name=name), iter=nodes.Name(name="messages"), test=None, recursive=False):
                self._messages.add(name)
                return all(self.reads(part, is_printed=False) for part in [*node.body, *node.else_])
            case nodes.Output(nodes=parts):
                return all(self.reads(part, is_printed=True) for part in parts)
            case nodes.Call(node=nodes.EnvironmentAttribute(), args=parts):  # the sandbox's own: it joins texts
                return all(self.reads(part, is_printed=is_printed) for part in parts)
        return isinstance(node, _PLAIN) and all(self.reads(part, is_printed=False) for part in node.iter_child_nodes())

    def _is_message(self, node: nodes.Node) -> bool:
        match node:
            case nodes.Name(name=name):
                return name in self._messages
            case nodes.Getitem(node=nodes.Name(name="messages"), arg=nodes.Const(value=int())):
                return True
        return False

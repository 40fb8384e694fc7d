"""The sandbox that chat templates run in: no way out, and an end to time and text (built once at start)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial, reduce
from types import BuiltinMethodType
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .template_bounds import (
    METHODS,
    BoundError,
    bound_filters,
    check_braces,
    check_percents,
    check_replaced,
    check_size,
    parts_to_join,
    size_of,
)

RENDER_SECONDS = 2.0
_SUM = "add_parts"


class _CodeGenerator(CodeGenerator):
    """Calls the sandbox's own methods as they are: only what a template calls needs a check."""

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802 (jinja2's)
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write(f"environment.{node.node.name}(context")
        for part in node.args:
            self.write(", ")
            self.visit(part, frame)
        self.write(")")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, where each turn of a loop and each call of a macro looks at the time.

    Time is the thread's own, so that a busy machine refuses nothing. What an operator makes is bounded before it is
    made.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _CodeGenerator

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols], finalize=_printable
        )
        self._clock = clock
        self._deadline = threading.local()  # renderings run on several threads
        bound_filters(self.filters)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compiled(self, source: str) -> Template:
        """A template. It has its globals in a plain table, which jinja2 goes through at each rendering."""
        template = self.from_string(source)
        template.globals = dict(template.globals)
        return template

    def begin(self) -> None:
        """The time of a rendering on this thread begins."""
        self._deadline.at = self._clock() + RENDER_SECONDS

    def tick(self, _: Context) -> None:
        """BoundError once the time is over."""
        if self._clock() > self._deadline.at:
            raise BoundError(f"it ran for more than {RENDER_SECONDS:g} s")

    def add_parts(self, context: Context, *parts: Any) -> Any:
        """What `+` between all of them means: mostly they are texts."""
        if set(map(type, parts)) == {str}:
            check_size(sum(map(len, parts)))
            return "".join(parts)
        return reduce(partial(self.call_binop, context, "+"), parts)

    def join_texts(self, _: Context, *parts: Any) -> str:
        """What `~` means."""
        texts = [str(_printable(part)) for part in parts]
        check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+" if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                check_size(len(left) + len(right))
            case "*" if isinstance(left, str | list | tuple) and isinstance(right, int):
                check_size(len(left) * right)
            case "*" if isinstance(right, str | list | tuple) and isinstance(left, int):
                check_size(len(right) * left)
            case "*" if isinstance(left, int) and isinstance(right, int):
                check_size(left.bit_length() + right.bit_length())
            case "**" if isinstance(left, int) and isinstance(right, int):
                check_size(left.bit_length() * right)
            case "%" if isinstance(left, str):
                check_percents(left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        methods = METHODS.get(type(obj))
        return super().is_safe_attribute(obj, attr, value) if methods is None else attr in methods

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """jinja2's own `str.format`, bounded."""
        make = super().wrap_str_format(value)
        if make is None:
            return None
        form = value.__self__

        def formatted(*args: Any, **fields: Any) -> str:
            check_braces(form, [args, fields])
            return make(*args, **fields)

        return formatted

    def call(self, context: Context, called: Any, *args: Any, **options: Any) -> Any:
        """Bounds what a text's own methods make."""
        if type(called) is BuiltinMethodType and isinstance(text := called.__self__, str):
            if called.__name__ == "replace":
                check_replaced(text, *args, **options)
            elif called.__name__ == "join":
                args = (parts_to_join(text, *args),)
        return super().call(context, called, *args, **options)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Bounds().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        return tree


class _Bounds(NodeTransformer):
    """Writes the sandbox's checks into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja2 looks it up by the node's name)
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _own("join_texts", node.nodes, node.lineno)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        left = node.left
        before = left.args if isinstance(left, nodes.Call) and left.node == nodes.EnvironmentAttribute(_SUM) else [left]
        return _own(_SUM, [*before, node.right], node.lineno)

    def _ticking(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_own("tick", [], node.lineno), lineno=node.lineno))
        return node


def _own(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    """A call of the sandbox's own method."""
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=lineno), arguments, [], None, None, lineno=lineno)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks a training mask: at inference it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _printable(value: Any) -> Any:
    """What is printed: a list's text is made in one go, so it must be short."""
    if isinstance(value, list | tuple | dict):
        size_of(value)
    return value


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

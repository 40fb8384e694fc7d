"""What filters and methods of a chat template may make: its size is found before it is made (lines run per use)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import islice
from string import Formatter
from typing import Any

from jinja2 import TemplateError

MAX_TEXT_CHARS = 2**20
_MAX_INDENT = 16
_NUMBER = re.compile(r"\d{1,9}")
_COMPUTED = re.compile(r"%[^a-zA-Z%]*\*")

# Methods of what a message is made of; whatever else Python's own types have, no template needs.
METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset({
        "capitalize", "casefold", "count", "endswith", "find", "format", "format_map", "index", "isalnum", "isalpha",
        "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower",
        "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit",
        "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
    }),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset(),
    float: frozenset(),
}  # fmt: skip
# Of pages of HTML, or of chance.
UNWANTED_FILTERS = frozenset({
    "batch", "center", "filesizeformat", "pprint", "random", "slice", "striptags", "urlize", "wordwrap", "xmlattr",
})  # fmt: skip
_OF_TEXTS = (
    "capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "title", "trim", "truncate", "upper",
    "urlencode", "wordcount",
)  # fmt: skip


class BoundError(TemplateError):
    """A rendering took more than its time, or made more than its text."""


def check_size(num_parts: int) -> None:
    """Characters, entries or bits."""
    if num_parts > MAX_TEXT_CHARS:
        raise BoundError(f"it made a text, list or number longer than {MAX_TEXT_CHARS}")


def size_of(value: Any) -> int:
    """Characters of `value` as a text, or somewhat fewer. BoundError past the bound, so lists of lists end, too."""
    left, size = [value], 0
    while left:
        match left.pop():
            case str() as text:
                size += len(text)
            case dict() as table:
                size += 2 + 4 * len(table)
                left += (*table, *table.values())
            case list() | tuple() | set() as entries:
                size += 2 + 2 * len(entries)
                left += entries
            case _:
                size += 1
        check_size(size)
    return size


def _check_text(value: Any, *_: Any, **__: Any) -> None:
    size_of(value)


def check_replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    size_of(text)
    text, old, new = str(text), str(old), str(new)
    check_size(len(text) + text.count(old) * len(new))


def check_percents(form: Any, values: Any) -> None:
    """Before `form % values`."""
    _check_form(str(form), "%", values, is_computed=_COMPUTED.search(str(form)) is not None)


def check_braces(form: str, values: Any) -> None:
    """Before `form.format(…)`."""
    specs = [spec for _, _, spec, _ in Formatter().parse(form) if spec]
    _check_form(form, "{", values, is_computed=any("{" in spec for spec in specs))


def _check_form(form: str, mark: str, values: Any, *, is_computed: bool) -> None:
    """A field prints all values at most, as wide as a number in the form says."""
    if is_computed:
        raise BoundError("it formats a text with a width that is a value itself")
    widest = sum(map(int, _NUMBER.findall(form)))
    check_size(len(form) + form.count(mark) * size_of(values) + widest)


def parts_to_join(between: Any, parts: Iterable[Any]) -> list[Any]:
    """A list of them, once all of it has room."""
    found = list(islice(parts, MAX_TEXT_CHARS + 1))
    check_size(size_of(found) + len(found) * len(str(between)))
    return found


def bound_filters(filters: dict[str, Callable[..., Any]]) -> None:
    """jinja2's own filters become bounded ones."""
    for name in UNWANTED_FILTERS:
        del filters[name]
    for name in _OF_TEXTS:
        filters[name] = _after(_check_text, filters[name])
    filters["replace"] = _after(check_replaced, filters["replace"])
    filters["indent"] = _after(_check_indented, filters["indent"])
    filters["format"] = _after(lambda form, *values, **named: check_percents(form, [values, named]), filters["format"])
    filters["sum"] = _after(_check_sum, filters["sum"])
    filters["join"] = _joining(filters["join"])
    filters["tojson"] = _tojson


def _after(check: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, after a check of its arguments, of which jinja2 may put its own before."""
    skipped = int(hasattr(made, "jinja_pass_arg"))

    @wraps(made)
    def checked(*args: Any, **options: Any) -> Any:
        check(*args[skipped:], **options)
        return made(*args, **options)

    return checked


def _joining(join: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(join)
    def joined(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        return join(context, parts_to_join(d, value), d, attribute)

    return joined


def _check_indented(text: Any, width: int | str = 4, *_: Any, **__: Any) -> None:
    size = size_of(text)
    lines = str(text).count("\n") + 1
    check_size(size + lines * (len(width) if isinstance(width, str) else width))


def _check_sum(_: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise BoundError("it sums what are not numbers")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and &, which no model was trained on.
    widths = [len(indent) if isinstance(indent, str) else indent or 0, *map(len, separators or ())]
    if max(widths) > _MAX_INDENT:
        raise BoundError(f"it writes JSON with more than {_MAX_INDENT} characters between entries")
    size_of(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

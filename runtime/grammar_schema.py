"""Which JSON schemas are served: what would be ignored or never end is refused by name (runs per request with one)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import Any
from urllib.parse import unquote

from ostinato.engines.errors import RequestError

from .grammar_regex import is_read_alike, json_pattern, shortest_text
from .serve_limits import ServeLimits

CODE = "unsupported_schema"
MAX_FORCED_CHARS = 8192  # that a schema or regex may demand in one piece: they are followed in one step
_MAX_SHOWN_CHARS = 64

ONE = ("items", "additionalProperties")  # a schema
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")  # of schemas
TABLES = ("properties", "patternProperties", "$defs", "definitions")  # of schemas by name
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_OTHERS = ("type", "enum", "const", "pattern", "format", "required", "uniqueItems", "$ref")
# Which demand nothing: those of the standard, and OpenAPI's.
NOTES = (
    *("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"),
    *("discriminator", "example"),
)
OF_ROOT = ("$schema", "$id")  # left out: every schema is read as of draft 2020-12
ANY_TEXT = ("password", "binary", "path", "file-path", "directory-path")  # formats that any text has
KNOWN = frozenset((*ONE, *LISTS, *TABLES, *_NUMBERS, *_COUNTS, *_OTHERS, *NOTES))
MAX_INT64 = 2**63 - 1
MAX_DIGITS = 15  # of a number: the compiler holds it as a double, and reads longer ones inexactly

Schema = Mapping[str, Any]


def check_schema(schema: object, param: str, limits: ServeLimits | None = None) -> None:
    """RequestError, code unsupported_schema, for a schema that this server can't hold an output to."""
    _Check(param, limits or ServeLimits()).whole(schema)


class _Check:
    """One schema's check; its fault names the place, never a value."""

    def __init__(self, param: str, limits: ServeLimits) -> None:
        self._param = param
        self._limits = limits
        self._root: Schema = {}
        self._ids: set[int] = set()  # of the schemas in it
        self._bare: dict[int, list[int]] = {}  # schemas by id → those that must hold for the same value
        self._whole: dict[int, list[int]] = {}  # … and those of values that must be in it

    def whole(self, schema: object) -> None:
        if schema is True:
            return
        if not isinstance(schema, dict):
            raise self._fault("", "no value fits it" if schema is False else "a schema is an object or true")
        self._root = {name: value for name, value in schema.items() if name not in OF_ROOT}
        nodes = list(self._nodes(self._root, "", 1))
        self._ids = {id(node) for _, node in nodes}
        for place, node in nodes:
            self._keywords(node, place)
            self._edges(node, place)
        for graph in (self._bare, self._whole):
            try:
                TopologicalSorter(graph).prepare()
            except CycleError:
                raise self._fault("", "it refers to itself so that no finite value fits it") from None

    def _nodes(self, node: object, place: str, depth: int) -> Iterator[tuple[str, Schema]]:
        """Every schema in it that is an object, and where."""
        if isinstance(node, bool):
            return
        if not isinstance(node, dict):
            raise self._fault(place, "a schema is an object or a truth value")
        if depth > self._limits.max_schema_depth:
            raise self._fault(place, f"it is nested deeper than {self._limits.max_schema_depth} schemas")
        yield place, node
        for name, value in node.items():
            here = f"{place}/{name[:_MAX_SHOWN_CHARS]}"
            if name not in KNOWN:
                raise self._fault(here, f"the keyword {name[:_MAX_SHOWN_CHARS]!r} is not supported")
            for at, inner in self._inner(name, value, here):
                yield from self._nodes(inner, f"{here}{at}", depth + 1)

    def _inner(self, name: str, value: object, here: str) -> Iterator[tuple[str, object]]:
        """The schemas in a keyword's value."""
        if name in ONE:
            yield "", value
        elif name in LISTS:
            if not isinstance(value, list) or not value:
                raise self._fault(here, "give a list of one or more schemas")
            yield from ((f"/{at}", inner) for at, inner in enumerate(value))
        elif name in TABLES:
            if not isinstance(value, dict):
                raise self._fault(here, "give an object of schemas")
            yield from ((f"/{key[:_MAX_SHOWN_CHARS]}", inner) for key, inner in value.items())

    def _keywords(self, node: Schema, place: str) -> None:
        if node.get("uniqueItems", False) is not False:
            raise self._fault(f"{place}/uniqueItems", "the keyword 'uniqueItems' is not supported: leave it out")
        for name in _NUMBERS:
            if name in node and not _is_number(node[name]):
                raise self._fault(f"{place}/{name}", "give a number")
        for name in (*_NUMBERS, "const", "enum"):
            if (name, node.get(name), node.get("type")) == ("maximum", MAX_INT64, "integer"):
                continue  # the one that is held all the same
            if not all(_is_exact(value) for value in _values(node.get(name)) if _is_number(value)):
                raise self._fault(f"{place}/{name}", f"a number has more than {MAX_DIGITS} digits")
        if "multipleOf" in node and not _divides_exactly(node["multipleOf"]):
            raise self._fault(
                f"{place}/multipleOf",
                "give an integer above 0, or 0.5, 0.25 and so on: readers divide by other fractions inexactly, "
                "so ask for an integer of a smaller unit, such as cents",
            )
        for name in _COUNTS:
            if name in node and (type(node[name]) is not int or node[name] < 0):
                raise self._fault(f"{place}/{name}", "give a count")
        self._bounds([node, *(part for part in node.get("allOf", ()) if isinstance(part, dict))], place)
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._fault(f"{place}/required", "give a list of names")
        # Names beyond those may come twice in an output, and a reader then sees one.
        if node.get("minProperties", 0) > len(set(required)) + 1:
            raise self._fault(
                f"{place}/minProperties", "it may exceed the number of required properties by one at most"
            )
        self._lengths(node, place)

    def _bounds(self, nodes: Sequence[Schema], place: str) -> None:
        """The compiler lets a whole number through that is an exclusive bound, if the other bound is near."""
        for own, others, side in (
            ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
            ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
        ):
            bounds = [node[own] for node in nodes if own in node]
            other = [node[name] for node in nodes for name in others if name in node]
            for bound, end in product(bounds, other):
                if _is_number(bound) and _is_number(end) and bound == int(bound) and 0 < side * (end - bound) < 1:
                    raise self._fault(
                        f"{place}/{own}", "a whole number less than 1 from the other bound is not supported"
                    )

    def _lengths(self, node: Schema, place: str) -> None:
        for name in ("pattern", *node.get("patternProperties", ())):
            regex = node.get("pattern", "") if name == "pattern" else name
            if not isinstance(regex, str):
                raise self._fault(f"{place}/pattern", "give a regex as text")
            if len(regex.encode()) > self._limits.max_regex_bytes:
                raise self._fault(place, f"a pattern exceeds {self._limits.max_regex_bytes} bytes")
            if name != "pattern" and not is_read_alike(regex):
                raise self._fault(
                    f"{place}/patternProperties",
                    "readers differ in which names match \\d, \\w and \\s: write the class out, such as [0-9]",
                )
            self._short(shortest_text(regex), place)
            try:
                json_pattern(regex)
            except ValueError as error:
                raise self._fault(place, f"a pattern can't be used: {error}") from None
        self._short(node.get("minLength", 0), place)
        for text in (*node.get("properties", ()), *_texts([node.get("const"), node.get("enum")])):
            self._short(len(text), place)

    def _short(self, num_chars: int, place: str) -> None:
        if num_chars > MAX_FORCED_CHARS:
            raise self._fault(place, f"it demands a text of more than {MAX_FORCED_CHARS} characters")

    def _edges(self, node: Schema, place: str) -> None:
        """What a value of this schema must fit too, and what must be inside it."""
        ways = [*node.get("anyOf", ()), *node.get("oneOf", ())]
        bare = [*node.get("allOf", ())]
        if "$ref" in node:
            bare.append(self._target(node["$ref"], place))
        self._bare[id(node)] = [id(other) for other in (*bare, *ways)]
        if len(ways) == 1:
            bare += ways
        properties = node.get("properties", {})
        inside = [properties.get(name, node.get("additionalProperties")) for name in node.get("required", ())]
        if node.get("minItems", 0) > len(node.get("prefixItems", ())):
            inside.append(node.get("items"))
        self._whole[id(node)] = [id(other) for other in (*bare, *inside) if isinstance(other, dict)]

    def _target(self, reference: object, place: str) -> object:
        """What a reference within the document points at."""
        if not isinstance(reference, str) or reference[:1] not in ("", "#"):
            raise self._fault(f"{place}/$ref", "only references within the schema are followed: begin with #")
        try:
            found = target(reference, self._root)
        except LookupError:
            raise self._fault(f"{place}/$ref", "it points at nothing in the schema") from None
        if reference[1:2] not in ("", "/") or not (isinstance(found, bool) or id(found) in self._ids):
            raise self._fault(f"{place}/$ref", "it does not point at a schema: give a path such as #/$defs/name")
        return found

    def _fault(self, place: str, why: str) -> RequestError:
        where = f"at {place[:256]}" if place else "at its top"
        return RequestError(f"the JSON schema can't be used, {where}: {why}", param=self._param, code=CODE)


def target(reference: str, root: Schema) -> object:
    """What a reference such as #/$defs/name points at; LookupError."""
    found: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdigit():
            found = found[int(part)]
        elif isinstance(found, dict):
            found = found[part]
        else:
            raise LookupError(part)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(number: Any) -> bool:
    """Whether the compiler takes it for what it is."""
    if isinstance(number, int) and abs(number) <= 2**53:
        return True
    return len(Decimal(repr(number)).normalize().as_tuple().digits) <= MAX_DIGITS


def _divides_exactly(number: Any) -> bool:
    """Whether every reader finds the same multiples of it."""
    if isinstance(number, int):
        return number > 0
    part = Fraction(repr(number))  # a half of what a double rounds is still a whole number, five halves are not
    return part.numerator == 1 and part.denominator & (part.denominator - 1) == 0


def _texts(value: object) -> Iterator[str]:
    """Every string in a JSON value."""
    return (inner for inner in _values(value) if isinstance(inner, str))


def _values(value: object) -> Iterator[object]:
    """Every value in a JSON value, and an object's names."""
    values = [value]
    while values:
        value = values.pop()
        yield value
        if isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            values += [*value, *value.values()]

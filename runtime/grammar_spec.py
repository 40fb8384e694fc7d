"""What a caller wants an output to look like: a grammar's kind and source (made per request)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "ebnf"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Equal specs are one grammar. `param`: the field of the body that asked for it, which an error names.

    `source`: the schema as JSON, the regex, the choices as a JSON list, "" of json_object. "ebnf" is a grammar that a
    caller wrote, in Lark's or GBNF's form; "lark" one that this server wrote, which may hold `%json {schema}` where
    `grammar_schema.check_schema` found the schema in order.
    """

    kind: Kind
    source: str
    param: str = field(default="response_format", compare=False)

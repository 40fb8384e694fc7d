"""What a caller wants an output to look like: a grammar's kind and source (made per request)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Equal specs are one grammar. `param`: the field of the body that asked for it, which an error names.

    `source`: the schema as JSON, the regex, the choices as a JSON list, the grammar in Lark's form; "" of json_object.
    """

    kind: Kind
    source: str
    param: str = "response_format"

"""JSON schemas of the bodies as the server checks them: types from the models, bounds from its limits (made at start).

What only several fields together decide (a stop of a stream, a context that is too long) no schema says: that is a 400.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.engines.sizes import MAX_LOGIT_BIAS

from .request import BIAS_RANGE, MAX_STOP_IDS, RANGES
from .serve_limits import ServeLimits
from .wire import WireModel

Schema = dict[str, Any]
REF = "#/components/schemas/{model}"
_NULL = {"type": "null"}


@dataclass(frozen=True)
class Known:
    """What is known of the model once it is loaded."""

    name: str
    vocab_size: int
    max_context: int


class BodySchemas:
    """Schemas by name; those of nested models are shared."""

    def __init__(self, limits: ServeLimits, known: Known | None, *, strict_fields: bool) -> None:
        self.by_name: dict[str, Schema] = {}
        self._limits = limits
        self._known = known
        self._strict = strict_fields
        self._model: Schema = {"type": "string"} if known is None else {"type": "string", "enum": [known.name]}

    @property
    def token_id(self) -> Schema:
        return {"type": "integer", "minimum": 0} | (
            {} if self._known is None else {"maximum": self._known.vocab_size - 1}
        )

    def max_tokens(self, minimum: int) -> Schema:
        """Bounds of an output's length, whose prompt has a token at least."""
        high = RANGES["max_tokens"][1] if self._known is None else self._known.max_context - 1
        return {"minimum": minimum, "maximum": int(high)}

    def add(self, kind: type[WireModel], bounds: Mapping[str, Schema] | None = None) -> Schema:
        """A reference to the schema of a whole body; `bounds` are keywords that a field has besides its type."""
        schema = kind.model_json_schema(ref_template=REF)
        models = {model.__name__: model for model in _below(WireModel)}
        for name, nested in schema.pop("$defs", {}).items():
            self.by_name[name] = _with_nulls(nested)
            if name in models:
                nested["properties"] |= unserved_fields(models[name])
                nested["additionalProperties"] = _NULL if self._strict or models[name].is_closed else True
        _with_nulls(schema)
        fields = schema["properties"]
        for name, keywords in {**self._shared_bounds(), **(bounds or {})}.items():
            if name in fields:
                fields[name] = keywords if "anyOf" in keywords else {**fields[name], **keywords}
        fields["model"] = self._model if "model" in schema.get("required", ()) else {"anyOf": [self._model, _NULL]}
        fields |= unserved_fields(kind)
        schema["additionalProperties"] = not self._strict
        self.by_name[kind.__name__] = schema
        return {"$ref": REF.format(model=kind.__name__)}

    def _shared_bounds(self) -> dict[str, Schema]:
        limits = self._limits
        bounds: dict[str, Schema] = {
            name: {"minimum": low, "maximum": high} for name, (low, high) in RANGES.items() if "logprobs" not in name
        }
        bounds["n"] = {"minimum": 1, "maximum": min(limits.max_choices, int(RANGES["n"][1]))}
        stop = {"type": "string", "minLength": 1, "maxLength": limits.max_stop_chars}
        bounds["stop"] = {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": limits.max_stops}, _NULL]}
        bounds["stop_token_ids"] = {"items": self.token_id, "maxItems": MAX_STOP_IDS}
        bounds["min_tokens"] = self.max_tokens(0)
        low, high = BIAS_RANGE
        bias = {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": low, "maximum": high},
            "maxProperties": min(limits.max_logit_bias, MAX_LOGIT_BIAS),
        }
        bounds["logit_bias"] = {"anyOf": [bias, _NULL]}
        return bounds


def unserved_fields(kind: type[WireModel]) -> dict[str, Schema]:
    """What is known and not served by a body or a part of one."""
    about = "Not served: only what asks for nothing."
    return {
        name: {"enum": [*entry.neutral, None], "description": about}
        for name, entry in kind.unserved.items()
        if name not in kind.model_fields
    }


def _below(kind: type[WireModel]) -> Iterator[type[WireModel]]:
    for model in kind.__subclasses__():
        yield model
        yield from _below(model)


def _with_nulls(schema: Schema) -> Schema:
    """null means unset in every field that may be left out; what pydantic adds for people goes."""
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        field.pop("title", None)
        field.pop("default", None)
        if name not in required and not _takes_null(field):
            schema["properties"][name] = {"anyOf": [field, _NULL]}
    schema.pop("title", None)
    return schema


def _takes_null(field: Schema) -> bool:
    return field == {} or field.get("type") == "null" or any(option == _NULL for option in field.get("anyOf", []))

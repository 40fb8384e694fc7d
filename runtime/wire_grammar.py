"""What an output must look like: OpenAI's response_format, vLLM's structured_outputs (lines run per request)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import FailFast, Field

from ostinato.engines.errors import RequestError

from .grammar_spec import GrammarSpec
from .wire import Name, WireModel
from .wire_unserved import LEFT_OUT, Unserved


class JsonSchema(WireModel):
    """A schema and its name. An output is held to it whatever `strict` says; name and description change nothing."""

    name: Name
    schema_: Any = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(WireModel):
    """OpenAI's."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "schema": Unserved((), ("json_schema",)),
        **dict.fromkeys(("format", "structures", "triggers"), LEFT_OUT),  # of vLLM's structural tags
    }

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def spec(self) -> GrammarSpec | None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError("type json_schema goes with the field json_schema: give both", param="response_format")
        if self.json_schema is not None:
            return GrammarSpec("json_schema", orjson.dumps(self.json_schema.schema_).decode(), "response_format")
        return None if self.type == "text" else GrammarSpec("json_object", "", "response_format")


class StructuredOutputs(WireModel):
    """vLLM's. Exactly one: a JSON schema, as JSON or as its text; a regex for all of the output; texts to choose from;
    a grammar in Lark's or GBNF's form; any JSON object.
    """

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **dict.fromkeys(("backend", "structural_tag", "whitespace_pattern"), LEFT_OUT),
        **dict.fromkeys(
            ("disable_additional_properties", "disable_any_whitespace", "disable_fallback"), Unserved((False,))
        ),
    }

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], FailFast()] = Field(default_factory=list)
    grammar: str | None = None
    json_object: Literal[True] | None = None

    def spec(self) -> GrammarSpec:
        param = "structured_outputs"
        given = [spec for spec in self._specs(param) if spec is not None]
        if len(given) != 1:
            raise RequestError("give one of json, regex, choice, grammar and json_object", param=param)
        return given[0]

    def _specs(self, param: str) -> list[GrammarSpec | None]:
        schema = self.json_
        text = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
        return [
            None if schema is None else GrammarSpec("json_schema", text, param),
            None if self.regex is None else GrammarSpec("regex", self.regex, param),
            None
            if "choice" not in self.model_fields_set
            else GrammarSpec("choice", orjson.dumps(self.choice).decode(), param),
            None if self.grammar is None else GrammarSpec("ebnf", self.grammar, param),
            None if self.json_object is None else GrammarSpec("json_object", "", param),
        ]


class GrammarFields(WireModel):
    """What chats and completions take."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def grammar(self) -> GrammarSpec | None:
        """What the output is held to, None for anything; RequestError where the fields contradict each other."""
        spec = None if self.response_format is None else self.response_format.spec()
        if self.structured_outputs is None:
            return spec
        if spec is not None:
            raise RequestError(
                "response_format and structured_outputs contradict each other: give one of them",
                param="structured_outputs",
            )
        return self.structured_outputs.spec()

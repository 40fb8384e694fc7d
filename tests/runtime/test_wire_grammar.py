"""The fields for structured output, alone: which spec they mean, and which of them contradict each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.grammar_spec import GrammarSpec
from ostinato.runtime.wire_chat import ChatBody
from ostinato.runtime.wire_completions import CompletionBody
from ostinato.runtime.wire_parse import parse_body

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def _spec(**fields: Any) -> GrammarSpec | None:
    chat = parse_body(
        ChatBody, json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields).encode()
    )
    completion = parse_body(CompletionBody, json.dumps({"model": "m", "prompt": "x"} | fields).encode())
    assert chat.grammar() == completion.grammar()
    return chat.grammar()


def _format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA} | fields}


def test_each_field_is_its_spec() -> None:
    assert _spec() is None
    assert _spec(response_format=None, structured_outputs=None) is None
    assert _spec(response_format={"type": "text"}) is None
    assert _spec(response_format={"type": "json_object"}) == GrammarSpec("json_object", "")
    for strict in (True, False, None):  # a schema is kept whatever strict says
        spec = _spec(response_format=_format(strict=strict, description="d"))
        assert spec is not None
        assert (spec.kind, json.loads(spec.source), spec.param) == ("json_schema", SCHEMA, "response_format")
        assert list(json.loads(spec.source)["properties"]) == ["b", "a"]  # their order is the output's
    assert _spec(structured_outputs={"regex": "a"}) == GrammarSpec("regex", "a")
    assert _spec(structured_outputs={"choice": ["é"]}) == GrammarSpec("choice", '["é"]')
    assert _spec(structured_outputs={"grammar": "g"}) == GrammarSpec("ebnf", "g")
    assert _spec(structured_outputs={"json_object": True, "regex": None}) == GrammarSpec("json_object", "")
    assert _spec(structured_outputs={"json": "{}"}) == _spec(structured_outputs={"json": {}})
    assert _spec(response_format={"type": "text"}, structured_outputs={"regex": "a"}) == GrammarSpec("regex", "a")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": _format(name="a b")}, "response_format.json_schema.name"),
        ({"response_format": _format(strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": {"type": "text", "json_schema": {"name": "n", "schema": {}}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        _spec(**fields)
    assert refused.value.param == param

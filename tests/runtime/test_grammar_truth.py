"""Schemas against random logits: what finishes fits its schema, as another library reads it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from jsonschema import Draft202012Validator

from ostinato.engines.errors import RequestError
from tests.grammars import Bench, anything, bench, endings, follow, no_end, parsed
from tests.scale import scaled
from tests.schemas import FEATURES, Schema, random_schema

NUM_SCHEMAS = scaled(300, 3000)
MODES = (anything, endings, no_end)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("tokenizer")) as made:
        yield made


def _outputs(grammars: Bench, schema: Schema, rng: random.Random) -> int:
    """How many finished; each must fit."""
    grammar = grammars.of_schema(schema)
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    finished = 0
    for choose in MODES:
        output = follow(grammar.start(), choose, rng)
        if output is not None:
            finished += 1
            text = grammars.text(output)
            faults = [error.message for error in validator.iter_errors(parsed(text))]
            assert not faults, (schema, text, faults)
    return finished


def test_every_finished_output_of_300_random_schemas_fits_or_the_schema_is_refused(grammars: Bench) -> None:
    rng = random.Random(7)
    accepted = finished = 0
    refusals = set()
    for _ in range(NUM_SCHEMAS):
        schema = random_schema(rng)
        try:
            finished += _outputs(grammars, schema, rng)
            accepted += 1
        except RequestError as error:
            refusals.add((error.param, error.code))
    assert refusals == {("response_format", "unsupported_schema")}
    assert accepted >= 0.8 * NUM_SCHEMAS
    assert finished >= NUM_SCHEMAS


@pytest.mark.parametrize("name", FEATURES)
def test_each_claimed_feature_is_accepted_and_kept(grammars: Bench, name: str) -> None:
    rng = random.Random(name)
    assert sum(_outputs(grammars, FEATURES[name], rng) for _ in range(4)) > 0

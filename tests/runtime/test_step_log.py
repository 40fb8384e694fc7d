"""What a step computed beside its own tokens: as its executor says, which may be nothing."""

from __future__ import annotations

import pytest

from ostinato.engines.program import StepShape
from ostinato.engines.shards import ONE_RANK
from ostinato.engines.sizes import Limits
from ostinato.runtime.console_state import steps_json
from ostinato.runtime.executor import StepRules
from ostinato.runtime.flight import StepTimes
from ostinato.runtime.gpu_rank import step_rules
from ostinato.runtime.ledger import Ledger
from ostinato.runtime.metrics import Metrics
from ostinato.runtime.step_inputs import StepShapes
from ostinato.runtime.step_log import StepRecord
from ostinato.runtime.trace_export import trace
from tests.fakes import bucket_rules

LIMITS = Limits(8, 6, 48, 96, 512, (1, 2, 4, 6), (1, 2, 4, 8, 16, 48))
AS_THEY_ARE = StepRules([0] * (LIMITS.max_rows + 1))
BUILT = (
    *(StepShape("decode", rows, rows) for rows in (1, 4, 8)),
    StepShape("prefill", 32, 8),
    StepShape("prefill", 64, 8),
)
ON_GPU = step_rules(ONE_RANK, LIMITS, StepShapes(BUILT, LIMITS))


def logged(rules: StepRules, *steps: tuple[int, int, int]) -> list[StepRecord]:
    """Steps of rows, tokens and sampled rows, through the ledger that a server keeps."""
    ledger = Ledger(Metrics(), LIMITS, rules)
    for step in steps:
        ledger.note_step(StepTimes(*step, *[0.0] * 8))
    return ledger.steps.last()


@pytest.mark.parametrize(
    ("rules", "computed"),
    [
        (AS_THEY_ARE, [1, 3, 5, 17, 48]),
        (bucket_rules(LIMITS), [1, 4, 8, 48, 48]),  # of 5 tokens in 3 rows: with a pad row
        (ON_GPU, [1, 4, 32, 32, 64]),  # the smallest shape built that holds it, even if it is past the limits
    ],
    ids=["nothing padded", "buckets", "shapes"],
)
def test_a_step_computed_what_its_executor_says(rules: StepRules, computed: list[int]) -> None:
    steps = [(1, 1, 1), (3, 3, 3), (3, 5, 3), (2, 17, 1), (1, 48, 1)]
    found = logged(rules, *steps)
    assert [record.computed for record in found] == computed
    assert [record.padding for record in found] == [
        count - tokens for count, (_, tokens, _) in zip(computed, steps, strict=True)
    ]


def test_where_nothing_is_padded_steps_of_about_a_size_are_shown_together() -> None:
    found = logged(AS_THEY_ARE, (3, 3, 3), (4, 4, 4), (2, 5, 2), (1, 33, 1))
    assert steps_json(found)["buckets"] == [
        {"bucket": 4, "steps": 2, "tokens": 7, "padding": 0},
        {"bucket": 8, "steps": 1, "tokens": 5, "padding": 0},
        {"bucket": 48, "steps": 1, "tokens": 33, "padding": 0},
    ]
    names = {event["name"] for event in trace(found, [])["traceEvents"]}
    assert {"decode 3", "decode 4", "prefill 33"} <= names
    assert "decode 3 of 4" in {event["name"] for event in trace(logged(ON_GPU, (3, 3, 3)), [])["traceEvents"]}

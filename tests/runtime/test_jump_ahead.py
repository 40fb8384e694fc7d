"""Tokens that a grammar forces: the same ids whether they are sampled or taken ahead, whatever ends an output."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.batch import Packer
from ostinato.runtime.choice import ChoiceStream
from ostinato.runtime.executor import Executor
from ostinato.runtime.grammar_guide import Grammar
from ostinato.runtime.grammar_spec import GrammarSpec
from ostinato.runtime.intake import Intake
from ostinato.runtime.loop import Loop
from ostinato.runtime.pages import Pages
from ostinato.runtime.request import Event, SamplingParams
from ostinato.runtime.scheduler import Scheduler
from tests.fakes import PosLM, make_limits
from tests.grammars import ENDS, VOCAB_SIZE, Bench, LateLM, bench, schema_spec
from tests.schemas import random_schema
from tests.tokenizers import EOS, EOT

LIMITS = make_limits(max_rows=12, max_step_tokens=32, max_context=96, num_blocks=40)
NUM_SCHEMAS = 200
TOGETHER = 20  # requests of one loop, more than its rows
A1 = schema_spec({"const": {"a": 1}})
Order = tuple[list[int], SamplingParams, Grammar]
Outcome = tuple[list[int], str, str | None, int]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("tokenizer")) as made:
        yield made


def _run(orders: list[Order], bench: Bench, executor: Executor, *, jump: bool) -> list[Outcome]:
    """Ids, text, finish and counted tokens of each, all in one loop."""
    loop = Loop(Scheduler(LIMITS, Pages(LIMITS), executor.rules), Packer(LIMITS, VOCAB_SIZE, executor.rules), executor)
    intake = Intake(VOCAB_SIZE, ENDS, LIMITS, jump_ahead=jump)
    choices: dict[int, ChoiceStream] = {}
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    for prompt, params, grammar in orders:
        (request,) = intake.requests(prompt, params, grammar=grammar)
        choices[request.id] = ChoiceStream(bench.tokenizer, prompt, params)
        texts[request.id], ids[request.id] = "", []
        loop.submit(request)
    for events in loop.run_until_idle():
        for event in events:
            _take(event, loop, choices[event.request_id], texts, ids)
    assert loop.scheduler.pages.num_free == loop.scheduler.pages.num_total
    return [(ids[n], texts[n], choices[n].finish_reason, choices[n].completion_tokens) for n in choices]


def _take(event: Event, loop: Loop, choice: ChoiceStream, texts: dict[int, str], ids: dict[int, list[int]]) -> None:
    delta = choice.push(event)
    if delta is None:
        return
    assert delta.error is None, delta.error
    texts[event.request_id] += delta.text
    ids[event.request_id] += delta.token_ids
    if choice.wants_abort:
        loop.abort(event.request_id)


def _params(rng: random.Random, seed: int) -> SamplingParams:
    max_tokens = rng.choice([1, 3, 12, 40, 40, 40])
    return SamplingParams(
        temperature=rng.choice([0.0, 0.8, 1.5]),
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 0, min(5, max_tokens)]),
        stop_token_ids=tuple(rng.sample(range(32, 127), rng.choice([0, 0, 0, 4]))),
        stop=rng.choice([(), (), ("a",), ('":', "zz"), ("e}",)]),
        ignore_eos=rng.random() < 0.2,
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        logprobs=rng.choice([None, None, None, 2]),
    )


def _orders(grammars: Bench, rng: random.Random, count: int) -> list[Order]:
    orders: list[Order] = []
    while len(orders) < count:
        try:
            grammar = grammars.of_schema(random_schema(rng))
        except RequestError:
            continue
        orders.append((rng.choices(range(256), k=rng.randint(1, 40)), _params(rng, len(orders)), grammar))
    return orders


def test_ids_texts_and_counts_of_200_schemas_are_equal_with_and_without(grammars: Bench) -> None:
    orders = _orders(grammars, random.Random(11), NUM_SCHEMAS)
    num_steps = {True: 0, False: 0}
    finishes = set()
    for start in range(0, NUM_SCHEMAS, TOGETHER):
        some = orders[start : start + TOGETHER]
        jumped, plain, late = PosLM(LIMITS, VOCAB_SIZE), PosLM(LIMITS, VOCAB_SIZE), LateLM(LIMITS, VOCAB_SIZE)
        expected = _run(some, grammars, plain, jump=False)
        assert _run(some, grammars, jumped, jump=True) == expected
        if start % 40 == 0:
            assert _run(some, grammars, late, jump=True) == expected
        num_steps[True] += jumped.num_steps
        num_steps[False] += plain.num_steps
        finishes |= {finish for _, _, finish, _ in expected}
    assert finishes == {"stop", "length"}
    assert num_steps[True] < num_steps[False]


def _one(grammars: Bench, grammar: Grammar, jump: bool = True, **params: object) -> Outcome:
    fields = {"temperature": 0.0, "seed": 1, "max_tokens": 40} | params
    executor = LateLM(LIMITS, VOCAB_SIZE)
    return _run([([1, 2, 3], SamplingParams(**fields), grammar)], grammars, executor, jump=jump)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("jump", [True, False])
class TestRules:
    def test_an_end_token_that_is_wished_for_at_every_step_comes_at_the_end(self, grammars: Bench, jump: bool) -> None:
        for end in (EOS, EOT):
            grammar = grammars.compile(A1)
            ids, text, finish, count = _one(grammars, grammar, jump, logit_bias=((end, 100.0),), max_tokens=90)
            assert (text, finish, ids[-1]) == ('{"a":1}', "stop", end)
            assert count == len(ids) <= 16

    def test_the_end_of_a_grammar_wins_over_min_tokens_and_ignore_eos(self, grammars: Bench, jump: bool) -> None:
        grammar = grammars.of_schema({"const": True})
        for params in ({"min_tokens": 30}, {"ignore_eos": True}, {"min_tokens": 30, "ignore_eos": True}):
            assert _one(grammars, grammar, jump, **params)[1:3] == ("true", "stop")

    def test_min_tokens_hold_where_the_grammar_can_go_on(self, grammars: Bench, jump: bool) -> None:
        grammar = grammars.compile(GrammarSpec("regex", "[ab]*"))
        _, text, finish, count = _one(grammars, grammar, jump, min_tokens=9, logit_bias=((EOS, 100.0),))
        assert (finish, count) == ("stop", 10)
        assert len(text) >= 9

    def test_a_ban_gives_way_where_nothing_else_is_legal(self, grammars: Bench, jump: bool) -> None:
        grammar = grammars.compile(GrammarSpec("choice", '["yes"]'))
        ban = tuple((token_id, -100.0) for token_id in b"yes")
        assert _one(grammars, grammar, jump, logit_bias=ban)[1:3] == ("yes", "stop")

    def test_a_stop_id_that_the_grammar_needs_cuts_the_output_there(self, grammars: Bench, jump: bool) -> None:
        grammar = grammars.compile(GrammarSpec("regex", "ab;cd"))
        assert _one(grammars, grammar, jump, stop_token_ids=(ord(";"),))[1:3] == ("ab", "stop")
        assert _one(grammars, grammar, jump, stop_token_ids=(ord(";"),), min_tokens=9)[1:3] == ("ab;cd", "stop")

    def test_stop_strings_and_max_tokens_cut_among_forced_tokens(self, grammars: Bench, jump: bool) -> None:
        grammar = grammars.compile(GrammarSpec("regex", "x[pq]some forced text"))
        assert _one(grammars, grammar, jump, stop=("forced",))[2] == "stop"
        assert _one(grammars, grammar, jump, stop=("forced",))[1][2:] == "some "
        ids, text, finish, count = _one(grammars, grammar, jump, max_tokens=9)
        assert (len(ids), len(text), finish, count) == (9, 9, "length", 9)

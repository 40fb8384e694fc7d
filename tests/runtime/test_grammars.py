"""The compile service: refusals that name their field, bombs that take nobody along, a cache with a bound."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.engines.errors import OstinatoError, RequestError
from ostinato.runtime.grammar_source import source_of
from ostinato.runtime.grammar_spec import GrammarSpec
from ostinato.runtime.grammar_trial import Trial, TrialError
from ostinato.runtime.grammars import MAX_PENDING, Grammars, GrammarsBusyError
from ostinato.runtime.serve_limits import MIB, ServeLimits
from ostinato.runtime.tokenizer import Tokenizer
from tests.grammars import ENDS, PATIENT, Bench, bench, schema_spec
from tests.scale import scaled
from tests.tokenizers import EOS, wordpiece

DOUBLED = "".join(f"{{0}}{n}: {{0}}{n + 1} {{0}}{n + 1}\n" for n in range(40)) + '{0}40: "x"\n'
BOMBS = {  # each is answered, one way or the other
    **{
        regex: GrammarSpec("regex", regex)
        for regex in (
            *("(a+)+b", "(a|a)*c", "a{1000000}", "(?:a{1000}){1000}", ".{0,9999}x.{0,9999}", "(.*a){50}"),
            *("((a{0,100}){0,100}){0,100}", r"\p{L}{1,5000}", "(a|b)*a(a|b){300}", "(" * 2000 + "a" + ")" * 2000),
        )
    },
    "enum of 100,000": schema_spec({"enum": [f"s{n}" for n in range(100_000)]}),
    "enum of 5,000": schema_spec({"enum": [f"s{n}" for n in range(5_000)]}),
    "500 optional": schema_spec({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(500)}}),
    "5 MB": schema_spec({"const": "a" * 5_000_000}),
    "a large prime": schema_spec({"type": "integer", "multipleOf": 999_983}),
    "many patterns": schema_spec({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnop"]}),
    "many items": schema_spec({"type": "array", "minItems": 10**9, "items": {"const": "a"}}),
    "deep": GrammarSpec("json_schema", '{"anyOf":[' * 2000 + "{}" + "]}" * 2000),
    "doubled terminals": GrammarSpec("ebnf", "start: A0\n" + DOUBLED.format("A")),
    "doubled rules": GrammarSpec("ebnf", "start: r0\n" + DOUBLED.format("r")),
    "parentheses": GrammarSpec("ebnf", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "intersection": GrammarSpec("ebnf", r"start: A" "\n" r"A: /(.|\n)*(a|b){4000}(c|d){4000}/ & /.*x.{3000}/" "\n"),
}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("tokenizer")) as made:
        yield made


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("tokenizer"), ServeLimits()) as made:
        yield made


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": "str"}}, {"type": "strnig"}, {"enum": []}, {"pattern": "("},
        {"$ref": "#/nope"}, {"type": "array", "items": [{}]}, [], None, "x", False, {"type": "string", "format": "foo"},
        {"type": "string", "minLength": 3, "maxLength": 2}, {"pattern": "a(?=b)"},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    ],
)  # fmt: skip
def test_a_schema_that_can_not_be_kept_is_refused_with_its_field(grammars: Bench, schema: object) -> None:
    with pytest.raises(RequestError) as refused:
        grammars.of_schema(schema)
    assert (refused.value.param, refused.value.code) == ("response_format", "unsupported_schema")
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "("), ("regex", ""), ("regex", "a" * 4097), ("choice", "[]"), ("choice", '["a", 1]'),
        ("choice", '"a"'), ("ebnf", "start: missing"), ("ebnf", "root ::= missing"), ("ebnf", ""),
        ("ebnf", '%llguidance {}\nstart: "a"'), ("ebnf", "start: x\nx[temperature=0.5]: /a/"), ("regex", "[a&&b]"),
    ],
)  # fmt: skip
def test_other_kinds_are_refused_with_their_field(grammars: Bench, kind: str, source: str) -> None:
    with pytest.raises(RequestError) as refused:
        grammars.compile(GrammarSpec(kind, source, "structured_outputs"))  # type: ignore[arg-type]
    assert refused.value.param == "structured_outputs"
    assert refused.value.code is not None
    assert refused.value.code.startswith("unsupported_")


def test_true_is_any_json_and_json_object_any_object(grammars: Bench) -> None:
    anything, an_object = grammars.of_schema(True), grammars.compile(GrammarSpec("json_object", ""))
    for text in ("[1,null]", '"x"', "-1.5e3", "true", '{"a":{}}'):
        assert grammars.accepts(anything, text)
        assert grammars.accepts(an_object, text) is text.startswith("{")


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_a_grammar_or_a_refusal_within_its_bounds(hasty: Bench, name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_at = time.thread_time()
    try:
        assert hasty.compile(BOMBS[name]).num_bytes < PATIENT.compile_bytes
    except RequestError as error:
        assert len(str(error)) < 500  # noqa: PT017 - either outcome is right
    assert time.thread_time() - began_at < 1.0  # of the asyncio thread's own time
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024


def test_time_and_memory_of_a_trial_are_bounded_and_the_next_one_runs(tmp_path: Path) -> None:
    limits = ServeLimits(compile_seconds=1.0)
    small = ServeLimits(compile_bytes=8 * MIB, compile_seconds=60.0)
    prime = BOMBS["a large prime"]
    with bench(tmp_path, limits) as hasty:
        began_at = time.monotonic()
        with pytest.raises(RequestError, match="does not compile within 1 s"):
            hasty.compile(prime)
        assert time.monotonic() - began_at < 30.0
        assert hasty.compile(GrammarSpec("regex", "a")).num_bytes
    with bench(tmp_path, small) as narrow:
        with pytest.raises(RequestError, match="needs more than 8 MiB"):
            narrow.compile(prime)
        assert narrow.compile(GrammarSpec("regex", "a")).num_bytes


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    with bench(tmp_path) as made:
        trial = Trial(made.grammars._setup(), PATIENT)
        trial._process.kill()
        trial._process.wait()
        with pytest.raises(TrialError):
            trial.run(source_of(GrammarSpec("regex", "a"), PATIENT))
        assert trial.is_spent


def test_a_worker_that_is_killed_while_it_waits_is_nobodys_refusal(tmp_path: Path) -> None:
    with bench(tmp_path) as made:
        made.compile(GrammarSpec("regex", "a"))
        (idle,) = made.grammars._idle.queue
        idle._process.kill()
        idle._process.wait()
        assert made.compile(GrammarSpec("regex", "b")).num_bytes
        (other,) = made.grammars._idle.queue
        assert other is not idle


def test_a_worker_imports_nothing_from_the_folder_it_starts_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    with bench(tmp_path) as made:
        assert made.compile(GrammarSpec("regex", "a")).num_bytes


def test_a_worker_without_its_server_ends_whatever_it_does(tmp_path: Path) -> None:
    limits = ServeLimits(compile_seconds=0.1, compile_bytes=4096 * MIB)
    with bench(tmp_path) as made:
        process = Trial(made.grammars._setup(), limits)._process
        assert process.stdin is not None
        source = source_of(BOMBS["a large prime"], PATIENT)
        process.stdin.write(json.dumps(source._asdict()).encode() + b"\n")
        process.stdin.close()  # as when the server is killed
        assert process.wait(120) == -signal.SIGXCPU


def test_what_is_kept_stays_within_its_bound_and_the_oldest_leaves(tmp_path: Path) -> None:
    limits = ServeLimits(compile_seconds=60.0, grammar_cache_bytes=2 * MIB)

    async def fill(service: Grammars) -> None:
        first = await service.compile(GrammarSpec("regex", "first"))
        sizes = []
        for number in range(scaled(150, 10_000)):
            await service.compile(GrammarSpec("regex", f"x{number}[a-z]+"))
            sizes.append(service.num_bytes)
            assert await service.compile(GrammarSpec("regex", "first", "else")) is first  # used, so it stays
        assert max(sizes) <= limits.grammar_cache_bytes
        assert max(sizes) > limits.grammar_cache_bytes // 2  # it was full
        assert sum(grammar.num_bytes for grammar in service._kept.values()) == service.num_bytes

    with bench(tmp_path, limits) as made:
        asyncio.run(fill(made.grammars))


def test_equal_specs_at_once_are_compiled_once_and_each_refusal_names_its_own_field(tmp_path: Path) -> None:
    async def at_once(service: Grammars) -> None:
        same = await asyncio.gather(*(service.compile(GrammarSpec("regex", "ab", f"p{n}")) for n in range(8)))
        assert len(set(map(id, same))) == 1
        refused = await asyncio.gather(
            *(service.compile(GrammarSpec("regex", "(", f"p{n}")) for n in range(8)), return_exceptions=True
        )
        assert [error.param for error in refused if isinstance(error, RequestError)] == [f"p{n}" for n in range(8)]
        many = await asyncio.gather(
            *(service.compile(GrammarSpec("regex", f"{n}")) for n in range(MAX_PENDING + 4)), return_exceptions=True
        )
        assert [isinstance(made, GrammarsBusyError) for made in many] == [False] * MAX_PENDING + [True] * 4
        assert await service.compile(GrammarSpec("regex", f"{MAX_PENDING}"))

    with bench(tmp_path) as made:
        asyncio.run(at_once(made.grammars))


def test_a_caller_who_leaves_does_not_take_the_grammar_from_others(tmp_path: Path) -> None:
    async def leave(service: Grammars) -> None:
        spec = GrammarSpec("regex", "abc")
        leaving = asyncio.create_task(service.compile(spec))
        staying = asyncio.create_task(service.compile(spec))
        await asyncio.sleep(0)
        leaving.cancel()
        assert (await staying).num_bytes
        assert leaving.cancelled() or leaving.cancelling()

    with bench(tmp_path) as made:
        asyncio.run(leave(made.grammars))


def test_a_tokenizer_that_can_not_be_followed_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    service = Grammars(Tokenizer(wordpiece(tmp_path / "words", ["a", "##b"])), frozenset({1}), PATIENT)
    with pytest.raises(OstinatoError, match="can't be used with this tokenizer"):
        asyncio.run(service.compile(GrammarSpec("regex", "a")))
    service.close()
    (tmp_path / "bytes").mkdir()
    with bench(tmp_path / "bytes") as made:
        service = Grammars(made.tokenizer, frozenset(), PATIENT)
        with pytest.raises(OstinatoError, match="names no end tokens"):
            asyncio.run(service.compile(GrammarSpec("regex", "a")))
        service.close()
    assert EOS in ENDS


def test_specs_are_equal_whatever_field_they_came_from() -> None:
    assert GrammarSpec("regex", "a", "p") == GrammarSpec("regex", "a", "q")
    assert json.loads(schema_spec({"a": 1}).source) == {"a": 1}

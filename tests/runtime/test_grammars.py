"""The compile service: refusals that name their field, bombs that take nobody along, a cache with a bound."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ostinato.engines.errors import OstinatoError, RequestError
from ostinato.runtime.grammar_source import source_of
from ostinato.runtime.grammar_spec import GrammarSpec
from ostinato.runtime.grammar_trial import GrammarsBusyError, Trial
from ostinato.runtime.grammars import MAX_PENDING, Grammars
from ostinato.runtime.serve_limits import MIB, ServeLimits
from ostinato.runtime.tokenizer import Tokenizer
from tests.grammar_bombs import BOMBS
from tests.grammars import ENDS, PATIENT, Bench, bench, schema_spec
from tests.scale import IS_SOAK, scaled
from tests.serving import PATIENCE_SECONDS, await_true
from tests.tokenizers import EOS, wordpiece


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


@pytest.mark.timed
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_a_grammar_or_a_refusal_within_its_bounds(hasty: Bench, name: str) -> None:
    hasty.compile_in_turn(
        GrammarSpec("choice", json.dumps([name]))
    )  # a worker is there, whatever became of the one before
    (worker,) = hasty.grammars._idle.queue
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_at, asked_at = time.thread_time(), time.monotonic()
    try:
        assert hasty.compile(BOMBS[name]).num_bytes < PATIENT.compile_bytes
    except (RequestError, GrammarsBusyError) as error:
        assert len(str(error)) < 500  # noqa: PT017 - either outcome is right
    seconds = time.monotonic() - asked_at
    print(f"{seconds:.2f} s")
    assert not IS_SOAK or seconds <= ServeLimits().compile_seconds
    assert time.thread_time() - began_at < 1.0  # of the asyncio thread's own time
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024
    assert not IS_SOAK or list(hasty.grammars._idle.queue) == [worker]  # it ended a fork at most


def test_time_and_memory_of_a_trial_are_bounded_and_the_next_one_runs(tmp_path: Path) -> None:
    limits = ServeLimits(compile_seconds=1.0)
    small = ServeLimits(compile_bytes=8 * MIB, compile_seconds=60.0)
    prime = BOMBS["a large prime"]
    with bench(tmp_path, limits) as hasty:
        began_at = time.monotonic()
        with pytest.raises((RequestError, GrammarsBusyError), match=r"does not compile within 1 s|too busy"):
            hasty.compile(prime)
        assert time.monotonic() - began_at < 30.0
        assert hasty.compile_in_turn(GrammarSpec("regex", "a")).num_bytes
    with bench(tmp_path, small) as narrow:
        with pytest.raises(RequestError, match="needs more than 8 MiB"):
            narrow.compile(prime)
        assert narrow.compile(GrammarSpec("regex", "a")).num_bytes


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    with bench(tmp_path) as made:
        trial = Trial(made.grammars._setup(), PATIENT)
        trial._process.kill()
        trial._process.wait()
        with pytest.raises(OstinatoError, match="has ended"):
            trial.run(source_of(GrammarSpec("regex", "a"), PATIENT))
        assert trial.has_ended


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


def forks_of(process: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in children.read_text().split()]


@pytest.mark.parametrize("how", ["its input ends", "it is killed"])
def test_a_trial_gives_way_and_ends_with_its_worker_and_that_with_its_server(tmp_path: Path, how: str) -> None:
    limits = ServeLimits(compile_seconds=60.0, compile_bytes=4096 * MIB)
    with bench(tmp_path) as made:
        trial = Trial(made.grammars._setup(), limits)
        process = trial._process
        assert process.stdin is not None
        source = source_of(BOMBS["a large prime"], PATIENT)
        process.stdin.write(json.dumps({**source._asdict(), "seconds": 4.0}).encode() + b"\n")
        process.stdin.flush()
        await_true(lambda: bool(forks_of(process)), "it did not fork")
        (fork,) = forks_of(process)
        await_true(lambda: os.sched_getscheduler(fork) == os.SCHED_IDLE, "the trial does not give way to steps")
        assert os.sched_getscheduler(process.pid) == os.sched_getscheduler(0)
        if how == "it is killed":
            trial.close()
        else:
            process.stdin.close()  # as when the server is killed
            assert process.wait(PATIENCE_SECONDS) == 0
        await_true(lambda: not Path(f"/proc/{fork}").exists(), "the fork goes on")


def test_a_grammar_that_got_no_processor_may_come_again_and_is_not_called_wrong(tmp_path: Path) -> None:
    with bench(tmp_path) as made:
        trial = Trial(made.grammars._setup(), ServeLimits())
        with ThreadPoolExecutor(1) as other:
            answer = other.submit(trial.run, source_of(BOMBS["a large prime"], PATIENT))
            await_true(lambda: bool(forks_of(trial._process)), "it did not fork")
            os.kill(forks_of(trial._process)[0], signal.SIGSTOP)
            with pytest.raises(GrammarsBusyError, match="too busy"):
                answer.result(PATIENCE_SECONDS)
        assert trial.run(source_of(GrammarSpec("regex", "a"), PATIENT)).num_bytes
        trial.close()


def test_what_is_kept_stays_within_its_bound_and_the_oldest_leaves(tmp_path: Path) -> None:
    limits = ServeLimits(compile_seconds=60.0, grammar_cache_bytes=2 * MIB)

    async def fill(service: Grammars) -> None:
        first = await service.compile(GrammarSpec("regex", "first"))
        sizes = []
        for number in range(scaled(500, 10_000)):
            await service.compile(GrammarSpec("regex", f"x{number}[a-z]+"))
            sizes.append(service.num_bytes)
            again = await service.compile(GrammarSpec("regex", "first", "else"))
            assert again.seed is first.seed  # used, so it stays
        assert max(sizes) <= limits.grammar_cache_bytes
        assert max(sizes) > limits.grammar_cache_bytes // 2  # it was full
        assert sum(grammar.num_bytes for grammar in service._kept.values()) == service.num_bytes

    with bench(tmp_path, limits) as made:
        asyncio.run(fill(made.grammars))


def test_equal_specs_at_once_are_compiled_once_and_each_refusal_names_its_own_field(tmp_path: Path) -> None:
    async def at_once(service: Grammars) -> None:
        same = await asyncio.gather(*(service.compile(GrammarSpec("regex", "ab", f"p{n}")) for n in range(8)))
        assert len({id(grammar.seed) for grammar in same}) == 1
        assert [grammar.param for grammar in same] == [f"p{n}" for n in range(8)]
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

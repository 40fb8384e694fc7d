"""Workers that start late, or are ended while they do, and grammars that are left with a part of their time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ostinato.engines.errors import OstinatoError, RequestError
from ostinato.runtime.grammar_source import Source, source_of
from ostinato.runtime.grammar_spec import GrammarSpec
from ostinato.runtime.grammar_trial import GrammarsBusyError, Trial, TrialError, Tried
from ostinato.runtime.serve_limits import ServeLimits
from tests.grammar_bombs import BOMBS
from tests.grammars import PATIENT, bench


def test_a_worker_that_is_killed_while_it_starts_is_nobodys_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_killed = 0

    def ask(trial: Trial, *question: Any) -> Any:
        nonlocal num_killed
        if num_killed < most_killed:
            num_killed += 1
            trial._process.kill()
        return asked(trial, *question)

    asked, most_killed = Trial._ask, 1
    monkeypatch.setattr(Trial, "_ask", ask)
    with bench(tmp_path) as made:
        assert made.compile(GrammarSpec("regex", "a")).num_bytes
        assert num_killed == 1
    num_killed, most_killed = 0, 2
    with bench(tmp_path) as made, pytest.raises(OstinatoError, match=r"does not start: .* has ended"):
        made.compile(GrammarSpec("regex", "a"))


def test_a_grammar_s_time_begins_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def run(trial: Trial, source: Source, seconds: float | None = None) -> Tried:
        given.append(seconds or 0.0)
        raise TrialError("no")

    monkeypatch.setattr(Trial, "run", run)
    most = PATIENT.compile_seconds
    with bench(tmp_path) as made:
        for wait in (0.0, most / 4, 9 * most):
            with pytest.raises(RequestError):
                made.grammars._make(GrammarSpec("regex", "a"), time.monotonic() - wait)
    assert 0.99 * most < given[0] <= most
    assert 0.74 * most < given[1] <= 0.75 * most
    assert given[2] == most / 2


def test_a_grammar_that_is_late_in_less_than_its_time_may_come_again(tmp_path: Path) -> None:
    with bench(tmp_path) as made:
        trial = Trial(made.grammars._setup(), ServeLimits())
        with pytest.raises(GrammarsBusyError, match="too busy"):
            trial.run(source_of(BOMBS["a large prime"], PATIENT), 0.2)
        trial.close()

"""Whatever fails between socket and loop, at any call of it: one answer is lost at most, and the next one is right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato.runtime import answer, answer_completions
from ostinato.runtime.choice import ChoiceStream
from ostinato.runtime.detokenizer import ByteDetokenizer
from ostinato.runtime.grammars import Grammars
from ostinato.runtime.intake import Intake
from ostinato.runtime.stream import Stream
from ostinato.runtime.tokenizer import Tokenizer
from tests.fakes import PosLM
from tests.http_calls import LIMITS
from tests.load.callers import Heard, body, call_all
from tests.scale import scaled
from tests.serving import VOCAB_SIZE, Running, serving

ASKED = [body(1, prompt="abc", stream=True, max_tokens=4), body(2, prompt="de", max_tokens=4)]
GUIDED = body(3, prompt="f", max_tokens=8, structured_outputs={"regex": "[a-z]{3}"}, ignore_eos=False)
POINTS: list[tuple[Any, str, Exception]] = [
    (Tokenizer, "encode", RuntimeError("tokenizer")),
    (ByteDetokenizer, "push", MemoryError()),
    (ByteDetokenizer, "finish", RuntimeError("detokenizer")),
    (ChoiceStream, "push", RuntimeError("choice")),
    (Intake, "requests", MemoryError()),
    (Grammars, "compile", RuntimeError("grammar")),
    (Stream, "add", RuntimeError("stream")),
    (answer_completions, "to_json", RuntimeError("json")),
    (answer_completions, "usage_of", RuntimeError("usage")),
    (answer, "_send_part", ConnectionResetError()),
    (answer, "_send_part", RuntimeError("socket")),
]


class FaultPoint:
    """Counts the calls of a function and fails one of them; 0: none."""

    def __init__(self, function: Callable[..., Any], error: Exception) -> None:
        self.num_calls = 0
        self.fails_at = 0
        self._function, self._error = function, error

    def wrapped(self) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self.fails_at:
                raise self._error
            return self._function(*arguments, **options)

        return call


def ask(server: Running, asked: list[dict[str, Any]]) -> list[Heard]:
    heard = asyncio.run(call_all(server.url, asked))
    server.await_idle()
    assert not server.bridge._rows
    return heard


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point[1].strip('_')}-{type(point[2]).__name__}")
def test_a_fault_at_any_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: tuple[Any, str, Exception]
) -> None:
    owner, name, error = point
    asked = [*ASKED, GUIDED] if owner is Grammars else ASKED
    fault = FaultPoint(getattr(owner, name), error)
    monkeypatch.setattr(owner, name, fault.wrapped())
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server:
        wanted = [one.text for one in ask(server, asked)]
        count = fault.num_calls
        assert count, "the point is not passed"
        for number in range(1, count + 1, max(1, count // scaled(4, count))):
            fault.num_calls, fault.fails_at = 0, number
            heard = ask(server, asked)
            fault.fails_at = 0
            assert sum(check(one, text) for one, text in zip(heard, wanted, strict=True)) <= 1, number
            assert [one.text for one in ask(server, asked)] == wanted, number
        with server.client() as client:
            assert client.get("/health/ready").status_code == 200


def check(heard: Heard, text: str) -> bool:
    """Whole and right, or plainly not whole; whether it was lost."""
    if heard.is_whole:
        assert heard.text == text
        return False
    if heard.status == 200:
        assert heard.num_ends <= 1
        assert heard.error is not None or not heard.is_closed, "a stream that broke ended as if it were whole"
    else:
        assert heard.status == 500
        assert heard.error is not None
        assert heard.error["type"] == "server_error"
    return True

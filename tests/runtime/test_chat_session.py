"""A conversation in the terminal: texts are shown as they are, and a turn that fails leaves no trace."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.chat_session import ChatSession
from ostinato.runtime.choice import Delta
from ostinato.runtime.request import SamplingParams


class EchoLLM:
    """Says the last message back; refuses one that begins with "no"."""

    def __init__(self) -> None:
        self.conversations: list[list[str]] = []

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        self.conversations.append([message["content"] for message in messages])
        if messages[-1]["content"].startswith("no"):
            raise RequestError(f"refused: {messages[-1]['content']}")
        return [1]

    def stream(self, prompt_ids: list[int], params: SamplingParams) -> Iterator[Delta]:
        yield Delta(self.conversations[-1][-1], (5,), ())
        yield Delta("", (), (), "stop")


def converse(lines: str) -> EchoLLM:
    llm: Any = EchoLLM()
    ChatSession(llm, SamplingParams(), None).converse(io.StringIO(lines))
    found: EchoLLM = llm
    return found


@pytest.mark.parametrize("text", [":apple: [bold]x[/bold] [/red]", "no [/red] :apple:"])
def test_texts_are_no_markup(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    converse(text + "\n")
    assert text in capsys.readouterr().out


def test_a_refused_turn_is_forgotten_and_empty_lines_are_none() -> None:
    assert converse("hi\n\n   \nno way\nagain").conversations == [
        ["hi"],
        ["hi", "hi", "no way"],
        ["hi", "hi", "again"],
    ]
    assert not converse("").conversations

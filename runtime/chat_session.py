"""A conversation in the terminal: asks, streams the answer, prints one line of figures (lines run per turn)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TextIO

from rich.console import Console
from rich.markup import escape

from ostinato.engines.errors import RequestError

from .llm import LLM
from .request import SamplingParams


class ChatSession:
    """Keeps the messages of one conversation; earlier turns come out of the prefix cache."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self._console = Console(highlight=False, emoji=False)  # an answer's :apple: stays as the model wrote it

    def converse(self, lines: TextIO) -> None:
        """Answer line after line until the end of input."""
        self._console.print("[dim]Ctrl-D ends the chat.[/dim]")
        while True:
            self._console.print("[bold]> [/bold]", end="")
            line = lines.readline()
            if not line:
                self._console.print()
                return
            if not line.strip():
                continue
            try:
                self.ask(line.strip())
            except RequestError as error:
                self._messages.pop()
                self._console.print(f"[red]{escape(str(error))}[/red]")

    def ask(self, text: str) -> None:
        """Stream the answer to one message, then say how fast it came."""
        self._messages.append({"role": "user", "content": text})
        prompt_ids = self._llm.chat_ids(self._messages)
        start = time.perf_counter()
        first: float | None = None
        num_tokens, answer = 0, []
        for delta in self._llm.stream(prompt_ids, replace(self._params, n=1)):
            first = first or time.perf_counter()
            num_tokens += len(delta.token_ids)
            answer.append(delta.text)
            self._console.print(delta.text, end="", markup=False, soft_wrap=True)
            if delta.error is not None:
                raise delta.error
        self._console.print()
        self._messages.append({"role": "assistant", "content": "".join(answer)})
        self._print_figures(len(prompt_ids), num_tokens, start, first or start)

    def _print_figures(self, num_prompt: int, num_tokens: int, start: float, first: float) -> None:
        seconds = time.perf_counter() - first
        speed = f"{num_tokens} tokens at {(num_tokens - 1) / seconds:.0f} tokens/s" if num_tokens > 1 else "no other"
        self._console.print(
            f"[dim]{num_prompt} prompt tokens, first token after {(first - start) * 1e3:.0f} ms, then {speed}[/dim]"
        )

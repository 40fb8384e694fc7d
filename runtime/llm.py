"""LLM: the same loop, driven by the caller, for scripts, tests and benchmarks (lines run per call and per step)."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ostinato.engines.errors import RequestError
from ostinato.engines.manifest import Manifest
from ostinato.engines.sizes import Limits

from .choice import ChoiceStream, Delta
from .config import RuntimeConfig
from .executor import LogitsObserver
from .libraries import REAL, Libraries
from .loop import StepObserver
from .progress import bar, loading
from .request import Event, SamplingParams, TokenLogprob
from .resident import release_freed_memory
from .shop import open_shop

Prompt = str | list[int]


@dataclass(frozen=True)
class Choice:
    """One finished choice. `token_ids` includes the token that ended it; `text` does not show it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    error: RequestError | None = None


@dataclass(frozen=True)
class Completion:
    """What one prompt gave: `params.n` choices. `num_cached` prompt tokens came from the prefix cache."""

    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    num_cached: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None


class LLM:
    """A bundle, opened for offline generation on the caller's thread. Use it as a context manager, or `close` it.

    A call from a second thread while a first one is in a step, and any call after `close`, raise RequestError.
    """

    def __init__(
        self,
        bundle: str | Path,
        config: RuntimeConfig | None = None,
        *,
        progress: bool = True,
        observe_logits: LogitsObserver | None = None,
        observe_step: StepObserver | None = None,
        libraries: Libraries = REAL,
    ) -> None:
        self._progress = progress
        with loading(progress) as show:
            self._shop = open_shop(Path(bundle), config or RuntimeConfig(), show, observe_logits, libraries)
        release_freed_memory()
        self._shop.loop.observe_step = observe_step
        self._rows: dict[int, _Row] = {}  # choices that are being made, of all calls
        self._stepping = threading.RLock()
        self._is_closed = False

    @property
    def manifest(self) -> Manifest:
        return self._shop.bundle.manifest

    @property
    def limits(self) -> Limits:
        return self._shop.limits

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text prompt, with BOS where the tokenizer adds one; ids come back as they are."""
        if isinstance(prompt, str):
            return self._shop.tokenizer.encode(prompt)
        if not isinstance(prompt, list | tuple):
            raise RequestError(f"a prompt is a {type(prompt).__name__}: give a text or a list of token ids")
        return list(prompt)

    def chat_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation by the bundle's chat template, ready for the assistant's turn."""
        return self._shop.tokenizer.apply_chat_template(messages)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete every prompt, batched as the limits allow; answers come in the prompts' order.

        `params`: one for all (default: SamplingParams()), or one a prompt. Raises RequestError before anything runs
        where a prompt or a parameter can't be served; a choice that fails while running carries its `error`.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts is one text: give a list of prompts")
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if not all(isinstance(one, SamplingParams) for one in each):
            raise RequestError("params holds something else than SamplingParams: give one for all, or one each")
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(each)} params: give one for all, or one each")
        calls = [_Call(self, self.encode(prompt), one) for prompt, one in zip(prompts, each, strict=True)]
        with bar(self._progress) as progress, closing(self._drive(calls)) as steps:
            task = progress.add_task("generate", total=sum(len(call.rows) for call in calls))
            for num_ended in steps:
                progress.update(task, completed=num_ended)
        return [call.completion() for call in calls]

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Delta]:
        """Deltas of one prompt's single choice, as they come. Closing the iterator early ends the choice."""
        call = _Call(self, self.encode(prompt), params)
        if len(call.rows) != 1:
            raise RequestError(f"n is {params.n}: a stream has one choice", param="n")
        (row,) = call.rows.values()
        num_shown = 0
        with closing(self._drive([call])) as steps:
            for _ in steps:
                fresh, num_shown = row.deltas[num_shown:], len(row.deltas)
                yield from fresh
        yield from row.deltas[num_shown:]  # what came while another call ran the steps

    def _drive(self, calls: Sequence[_Call]) -> Generator[int]:
        """Run steps until all choices of `calls` have ended; yields after each how many have.

        Other calls' choices may be open meanwhile (a stream between two reads): they get what is theirs. What is open
        when the caller leaves is aborted.
        """
        mine = {request_id: row for call in calls for request_id, row in call.rows.items()}
        open_ids = set(mine)
        for row in mine.values():
            row.open_ids = open_ids
        self._rows |= mine
        try:
            for call in calls:
                for request in call.requests:
                    self._shop.loop.submit(request)
            steps = self._shop.loop.run_until_idle()
            while self._step(steps):
                yield len(mine) - len(open_ids)
                if not open_ids and self._rows:
                    return
        finally:
            for request_id in open_ids:
                del self._rows[request_id]
                self._shop.loop.abort(request_id)

    def _step(self, steps: Iterator[list[Event]]) -> bool:
        """Run one step and hand out its events; False if nothing was left to do."""
        if not self._stepping.acquire(blocking=False):
            raise RequestError("another thread runs this LLM: call it from one thread, or open an LLM for each")
        try:
            if self._is_closed:
                raise RequestError("this LLM is closed: open the bundle again")
            events = next(steps, None)
            for event in events or ():
                self._take(event)
            return events is not None
        finally:
            self._stepping.release()

    def _take(self, event: Event) -> None:
        """Hand an event to its row, if that is still open."""
        row = self._rows.get(event.request_id)
        if row is None:
            return
        if (delta := row.stream.push(event)) is not None:
            row.deltas.append(delta)
        if row.stream.wants_abort:
            self._shop.loop.abort(event.request_id)
        if row.stream.finish_reason is not None:
            del self._rows[event.request_id]
            row.open_ids.discard(event.request_id)

    def close(self) -> None:
        """Release the executor; streams that are open raise RequestError at their next step."""
        with self._stepping:  # another thread may be in a step
            self._is_closed = True
            self._shop.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Row:
    """A choice being collected."""

    def __init__(self, stream: ChoiceStream) -> None:
        self.stream = stream
        self.deltas: list[Delta] = []
        self.open_ids: set[int] = set()  # of the call that it belongs to

    def choice(self) -> Choice:
        reason = self.stream.finish_reason
        assert reason is not None, "the loop went idle before a choice ended"
        return Choice(
            "".join(delta.text for delta in self.deltas),
            tuple(token for delta in self.deltas for token in delta.token_ids),
            tuple(logprob for delta in self.deltas for logprob in delta.logprobs),
            reason,
            self.deltas[-1].error,
        )


class _Call:
    """One prompt with its choices."""

    def __init__(self, llm: LLM, prompt_ids: list[int], params: SamplingParams) -> None:
        self.prompt_ids = prompt_ids
        self.requests = llm._shop.intake.requests(prompt_ids, params)
        self.rows = {
            request.id: _Row(ChoiceStream(llm._shop.tokenizer, prompt_ids, params)) for request in self.requests
        }

    def completion(self) -> Completion:
        first = next(iter(self.rows.values())).stream
        choices = tuple(row.choice() for row in self.rows.values())
        return Completion(tuple(self.prompt_ids), choices, first.num_cached, first.prompt_logprobs)

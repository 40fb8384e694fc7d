"""`ostinato generate`: prompts in, one line of text or JSON each out (lines run per prompt)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.errors import RequestError

from .config import RuntimeConfig
from .llm import LLM, Completion, Prompt
from .request import SamplingParams, TokenLogprob

_FIELDS = {field.name for field in fields(SamplingParams)}


@dataclass(frozen=True)
class LineRequest:
    """One line of work: a prompt (text or ids) or messages, and its parameters."""

    prompt: Prompt | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams


def read_requests(
    prompt: str | None, prompt_ids: str | None, path: Path | None, params: SamplingParams
) -> list[LineRequest]:
    """The requests of a call; a line of the file overrides `params` field by field."""
    if prompt is not None:
        return [LineRequest(prompt, None, params)]
    if prompt_ids is not None:
        return [LineRequest(_parse_ids(prompt_ids), None, params)]
    assert path is not None
    text = sys.stdin.read() if str(path) == "-" else path.read_text()
    lines = [line for line in text.splitlines() if line.strip()]
    return [_parse_line(number, line, params) for number, line in enumerate(lines, 1)]


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--prompt-ids is {text[:60]!r}: give whole numbers separated by commas") from None


def _parse_line(number: int, line: str, params: SamplingParams) -> LineRequest:
    try:
        table = json.loads(line)
        sources = [table.pop(key, None) for key in ("prompt", "prompt_ids", "messages")]
    except (json.JSONDecodeError, AttributeError) as error:
        raise RequestError(f"line {number} is not a JSON object: {error}") from None
    if sum(source is not None for source in sources) != 1:
        raise RequestError(f"line {number}: give exactly one of prompt, prompt_ids and messages")
    if unknown := sorted(set(table) - _FIELDS):
        raise RequestError(
            f"line {number} has unknown fields {', '.join(unknown)}: known are {', '.join(sorted(_FIELDS))}"
        )
    params_table: dict[str, Any] = {name: getattr(params, name) for name in _FIELDS} | _frozen(table)
    try:
        return LineRequest(
            sources[0] if sources[0] is not None else sources[1], sources[2], SamplingParams(**params_table)
        )
    except TypeError as error:
        raise RequestError(f"line {number} has a value of the wrong type: {error}") from None


def _frozen(table: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists as tuples; one stop string may stand without a list."""
    if isinstance(table.get("stop"), str):
        table["stop"] = [table["stop"]]
    if isinstance(table.get("logit_bias"), dict):
        table["logit_bias"] = [(int(token_id), value) for token_id, value in table["logit_bias"].items()]
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


class GenerateLines:
    """Runs the requests of one call against one bundle."""

    def __init__(self, bundle: Path, config: RuntimeConfig, *, dump_logits: Path | None) -> None:
        self._bundle = bundle
        self._config = config
        self._dump_path = dump_logits
        self._logits: list[NDArray[np.float32]] = []

    def run(self, requests: Sequence[LineRequest], *, as_json: bool) -> int:
        """Print every answer; 1 if a choice ended with an error."""
        observe = None if self._dump_path is None else self._keep
        with LLM(self._bundle, self._config, observe_logits=observe, progress=sys.stderr.isatty()) as llm:
            prompts = [self._prompt(llm, request) for request in requests]
            if self._dump_path is None:
                completions = llm.generate(prompts, [request.params for request in requests])
            else:
                completions = self._dump(llm, prompts, requests)
        for completion in completions:
            print(json.dumps(_as_table(completion)) if as_json else "\n".join(c.text for c in completion.choices))
        return int(any(choice.error is not None for completion in completions for choice in completion.choices))

    def _prompt(self, llm: LLM, request: LineRequest) -> Prompt:
        if request.messages is not None:
            return llm.chat_ids(request.messages)
        assert request.prompt is not None
        return request.prompt

    def _dump(self, llm: LLM, prompts: Sequence[Prompt], requests: Sequence[LineRequest]) -> list[Completion]:
        """One prompt at a time, so that the logits' order is the positions' order."""
        assert self._dump_path is not None
        completions, parts = [], []
        for prompt, request in zip(prompts, requests, strict=True):
            self._logits.clear()
            params = replace(request.params, prompt_logprobs=0, max_tokens=1, min_tokens=0, n=1)
            completions += llm.generate([prompt], params)
            parts += self._logits
        np.save(self._dump_path, np.concatenate(parts))
        return completions

    def _keep(self, logits: NDArray[np.float32]) -> None:
        self._logits.append(logits.copy())


def _as_table(completion: Completion) -> dict[str, Any]:
    choices = [
        {
            "text": choice.text,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "logprobs": [_logprob(token) for token in choice.logprobs],
            "error": None if choice.error is None else str(choice.error),
        }
        for choice in completion.choices
    ]
    scored = completion.prompt_logprobs
    return {
        "prompt_ids": completion.prompt_ids,
        **choices[0],
        "choices": choices,
        "num_cached": completion.num_cached,
        "prompt_logprobs": None if scored is None else [None if token is None else _logprob(token) for token in scored],
    }


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return token._asdict()

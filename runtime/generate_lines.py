"""`ostinato generate`: prompts in, one line of text or JSON each out (lines run per prompt)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import RuntimeConfig
from .llm import LLM, Completion, Prompt
from .request import TokenLogprob
from .request_lines import LineRequest


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

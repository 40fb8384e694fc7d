"""Runs a bundle as a user does, through `ostinato generate`: this room never imports the runtime (offline)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.engines.errors import BuildError

from .verify import F32, Schedule


@dataclass(frozen=True)
class BundleProcess:
    """A `verify.Subject`; every call is one process that loads the bundle, runs and ends."""

    bundle: Path

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int, schedule: Schedule) -> list[list[int]]:
        options = ["--max-rows", str(schedule.max_rows), "--max-step-tokens", str(schedule.max_step_tokens)]
        options += ["--prefix-cache", "on" if schedule.prefix_cache else "off"]
        answers = self._generate([_request(prompt, num_tokens) for prompt in prompts], options)
        found = [answer["token_ids"] for answer in answers]
        if [len(tokens) for tokens in found] != [num_tokens] * len(prompts):
            raise BuildError(
                f"the bundle gave {[len(tokens) for tokens in found]} tokens, {num_tokens} each were asked"
            )
        return found

    def logits(self, texts: Sequence[Sequence[int]]) -> F32:
        with tempfile.TemporaryDirectory() as scratch:
            dump = Path(scratch) / "logits.npy"
            self._generate([_request(text, 1) for text in texts], ["--prefix-cache", "off", "--dump-logits", str(dump)])
            logits: F32 = np.load(dump)
        if len(logits) != sum(map(len, texts)):
            raise BuildError(f"the bundle gave {len(logits)} rows of logits for {sum(map(len, texts))} tokens")
        return logits

    def _generate(self, requests: list[dict[str, Any]], options: list[str]) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "requests.jsonl"
            file.write_text("".join(json.dumps(request) + "\n" for request in requests))
            command = [str(Path(sys.executable).with_name("ostinato")), "generate", str(self.bundle)]
            done = subprocess.run(
                [*command, "--requests", str(file), "--json", *options], capture_output=True, text=True, check=False
            )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise BuildError(f"`ostinato generate` could not run {self.bundle}: {reason}")
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if len(answers) != len(requests):
            raise BuildError(f"`ostinato generate` answered {len(answers)} of {len(requests)} requests")
        return answers


def _request(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {"prompt_ids": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

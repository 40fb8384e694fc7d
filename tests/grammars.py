"""Grammars over a small vocabulary, and outputs that follow them at random (made per test)."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import F32, Sampled
from ostinato.runtime.batch import Batch
from ostinato.runtime.grammar_guide import Grammar
from ostinato.runtime.grammar_spec import GrammarSpec
from ostinato.runtime.grammar_trial import GrammarsBusyError
from ostinato.runtime.grammars import Grammars
from ostinato.runtime.guide import Guide
from ostinato.runtime.host_ticket import HostTicket
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.tokenizer import Tokenizer
from tests.fakes import PosLM, sampled_on_host
from tests.serving import PATIENCE_SECONDS
from tests.tokenizers import EOS, EOT, SYS, byte_level

PIECES: Mapping[int, str] = dict(enumerate(
    ['{"', '":', '"}', '",', "[]", "},", "ab", "abc", "tr", "true", "nul", "12", "00", "\\\\", '\\"', "zz", "zzz"],
    SYS + 1,
))  # fmt: skip
VOCAB_SIZE = SYS + 1 + len(PIECES)
ENDS = frozenset({EOS, EOT})
PATIENT = ServeLimits(compile_seconds=60.0)  # where no test is about time, a busy machine must not matter
_CLOSING = [token_id for token_id, text in ({n: chr(n) for n in range(128)} | dict(PIECES)).items() if text in '"]}",']


class LateLM:
    """PosLM that samples when it is waited for, as the CPU's executor does."""

    trouble: str | None = None
    coverage = None

    def __init__(self, limits: Limits, vocab_size: int) -> None:
        self.inner = PosLM(limits, vocab_size)
        self.rules = replace(self.inner.rules, samples_in_wait=True)
        self._logits: F32 | None = None  # of the step in flight

    def run(self, batch: Batch) -> HostTicket:
        self._logits = self.inner.logits(batch)
        return HostTicket(self, batch)

    def finish(self, batch: Batch) -> Sampled:
        assert self._logits is not None, "no step runs"
        return sampled_on_host(self._logits, batch)

    def close(self) -> None:
        self.inner.close()


class Bench:
    """Grammars and a tokenizer whose tokens are bytes and some pieces."""

    def __init__(self, folder: Path, limits: ServeLimits) -> None:
        self.tokenizer = Tokenizer(byte_level(folder, PIECES))
        self.grammars = Grammars(self.tokenizer, ENDS, limits)

    def compile(self, spec: GrammarSpec) -> Grammar:
        return asyncio.run(self.grammars.compile(spec))

    def compile_in_turn(self, spec: GrammarSpec) -> Grammar:
        """Comes again as long as it is told that the machine is busy."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self.compile(spec)
            except GrammarsBusyError:
                assert time.monotonic() < until

    def of_schema(self, schema: object) -> Grammar:
        return self.compile(schema_spec(schema))

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether the text, byte by byte or as its tokens, is a whole output."""
        guide = grammar.start()
        return all(_may(guide, token_id) for token_id in self.shaped(guide, text)) and bool(allowed(guide) & ENDS)

    def shaped(self, guide: Guide, text: str) -> Iterator[int]:
        """Tokens of the text: each the longest that the guide allows, else the next byte."""
        rest = text.encode()
        while rest:
            fits = [n for n in allowed(guide) if (raw := self.tokenizer.token_bytes(n)) and rest.startswith(raw)]
            token_id = max(fits, key=lambda n: len(self.tokenizer.token_bytes(n)), default=rest[0])
            yield token_id
            rest = rest[len(self.tokenizer.token_bytes(token_id)) :]

    def text(self, ids: list[int]) -> str:
        return b"".join(self.tokenizer.token_bytes(token_id) for token_id in ids if token_id not in ENDS).decode()


@contextmanager
def bench(folder: Path, limits: ServeLimits = PATIENT) -> Iterator[Bench]:
    made = Bench(folder, limits)
    try:
        yield made
    finally:
        made.grammars.close()


def schema_spec(schema: object) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def allowed(guide: Guide) -> set[int]:
    """Ids whose bit is set, of the whole mask."""
    words = np.full(-(-VOCAB_SIZE // 32) + 1, -1, np.int32)
    guide.fill_mask(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def _may(guide: Guide, token_id: int) -> bool:
    if token_id not in allowed(guide):
        return False
    guide.accept(token_id)
    return True


Choose = Callable[[random.Random, set[int]], int]


def anything(rng: random.Random, ids: set[int]) -> int:
    return rng.choice(sorted(ids))


def endings(rng: random.Random, ids: set[int]) -> int:
    """Ends whatever can be ended."""
    best = ids & ENDS or {token_id for token_id in _CLOSING if token_id in ids}
    return rng.choice(sorted(best if best and rng.random() < 0.8 else ids))


def no_end(rng: random.Random, ids: set[int]) -> int:
    """Goes on as long as anything but the end is legal; closes strings now and then, else none would be seen."""
    closing = {token_id for token_id in _CLOSING if token_id in ids}
    return rng.choice(sorted(closing if closing and rng.random() < 0.3 else ids - ENDS or ids))


def follow(guide: Guide, choose: Choose, rng: random.Random, max_tokens: int = 96) -> list[int] | None:
    """An output to its end, or None where it is not over by `max_tokens`."""
    output: list[int] = []
    while not guide.has_ended and len(output) < max_tokens:
        ids = allowed(guide)
        assert ids, f"no token is legal after {output}"
        output.append(choose(rng, ids))
        guide.accept(output[-1])
    return output if guide.has_ended else None


def parsed(text: str) -> Any:
    """JSON, strictly: no NaN, no infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)

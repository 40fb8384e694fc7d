"""The grammars of a server: tried out in a worker, compiled on a thread, kept while there is room (runs per request).

         asyncio thread │ a grammar's thread                                 │ worker process
compile ─ kept? ────────┼─▶ check the source ──▶ try it out ─────────────────┼─▶ compile, follow at random
a Grammar ◀─────────────┼── compile once more ◀── it holds: size ◀───────────┤   (bounded in time and memory)
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import llguidance

from ostinato.engines.errors import OstinatoError, RequestError

from .grammar_guide import Grammar, Vocabulary
from .grammar_source import NAMES, source_of
from .grammar_spec import GrammarSpec
from .grammar_trial import MASK_BOUNDS, GrammarsBusyError, Trial, TrialError, WorkerEndedError
from .serve_limits import ServeLimits
from .tokenizer import Tokenizer

NUM_WORKERS = 2
MAX_PENDING = 16  # new grammars at once
_LEAST_SHARE = 0.5  # of a grammar's time, however long it waited for its turn or for a worker to start
MIN_BYTES = 4096  # of a kept grammar, its books included

logger = logging.getLogger(__name__)


class Grammars:
    """Compiles specs; one that was asked for lately is found. `close` when done; workers start when they are needed."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int], limits: ServeLimits) -> None:
        self.num_bytes = 0  # of what is kept
        self._tokenizer = tokenizer
        self._end_ids = eos_ids
        self._limits = limits
        self._kept: OrderedDict[GrammarSpec, Grammar] = OrderedDict()  # the least recently used first
        self._coming: dict[GrammarSpec, asyncio.Future[Grammar]] = {}
        self._pool = ThreadPoolExecutor(NUM_WORKERS, "grammar")
        self._idle: queue.LifoQueue[Trial] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._compiler: llguidance.LLTokenizer | None = None
        self._is_closed = False

    @property
    def num_idle(self) -> int:
        """Workers that wait for a grammar."""
        return self._idle.qsize()

    def warm(self) -> None:
        """Start the workers, and wait until they have: the first specs then have all of their time."""
        if self._end_ids:
            wait([self._pool.submit(self._warm) for _ in range(NUM_WORKERS)])

    def _warm(self) -> None:
        try:
            self._put_back(self._new_worker())
            self._native()
        except OstinatoError as error:  # who asks for a grammar will be told, too
            logger.warning("no grammar can be used: %s", error)

    async def compile(self, spec: GrammarSpec) -> Grammar:
        """RequestError that names `spec.param` where it can't be used; GrammarsBusyError."""
        if (grammar := self._kept.get(spec)) is not None:
            self._kept.move_to_end(spec)
            return grammar.of(spec.param)
        if (coming := self._coming.get(spec)) is None:
            if len(self._coming) >= MAX_PENDING:
                raise GrammarsBusyError(f"{MAX_PENDING} new grammars are being compiled: try again later")
            coming = asyncio.get_running_loop().run_in_executor(self._pool, self._make, spec, time.monotonic())
            self._coming[spec] = coming
            coming.add_done_callback(lambda done: self._came(spec, done))
        try:
            return (await asyncio.shield(coming)).of(spec.param)
        except RequestError as error:  # of whoever asked first
            raise RequestError(str(error), param=spec.param, code=error.code) from None

    def _came(self, spec: GrammarSpec, done: asyncio.Future[Grammar]) -> None:
        del self._coming[spec]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[spec] = grammar = done.result()
        self.num_bytes += grammar.num_bytes
        while self.num_bytes > self._limits.grammar_cache_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def _make(self, spec: GrammarSpec, asked_at: float) -> Grammar:
        """On a thread of the pool. A grammar's time begins when it is asked for."""
        source, most = source_of(spec, self._limits), self._limits.compile_seconds
        trial = self._worker()
        waited = time.monotonic() - asked_at
        try:
            tried = trial.run(source, max(most - waited, _LEAST_SHARE * most))
        except TrialError as error:
            raise RequestError(
                f"the {NAMES[spec.kind]} can't be used: {error}",
                param=spec.param,
                code="unsupported_schema" if spec.kind.startswith("json") else "unsupported_grammar",
            ) from None
        finally:
            self._put_back(trial)
        tokenizer = self._native()
        limits = llguidance.LLParserLimits(verbose_errors=False, **MASK_BOUNDS._asdict())
        grammar = llguidance.LLMatcher.grammar_from_lark(tried.text)
        seed = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if seed.is_error():
            raise OstinatoError("a grammar that held in the worker does not compile in the server")
        vocabulary = Vocabulary(tokenizer, self._end_ids, self._tokenizer.special_ids, not source.head)
        return Grammar.of_seed(seed, vocabulary, MIN_BYTES + 2 * len(spec.source) + tried.num_bytes)

    def _worker(self) -> Trial:
        """One that waits, if nobody has killed it meanwhile, or a new one."""
        with suppress(queue.Empty):
            while True:
                trial = self._idle.get_nowait()
                if not trial.has_ended:
                    return trial
                trial.close()
        return self._new_worker()

    def _new_worker(self) -> Trial:
        """Whoever ended one while it started may have meant another process."""
        try:
            return Trial(self._setup(), self._limits)
        except WorkerEndedError:
            return Trial(self._setup(), self._limits)

    def _put_back(self, trial: Trial) -> None:
        with self._lock:
            if trial.has_ended or self._is_closed:
                trial.close()
            else:
                self._idle.put(trial)

    def _setup(self) -> dict[str, Any]:
        if not self._end_ids:
            raise OstinatoError("the bundle names no end tokens, which a grammar needs: build it again with some")
        return {
            "tokenizer": self._tokenizer.to_json(),
            "vocab_size": self._tokenizer.vocab_size,
            "eos_ids": sorted(self._end_ids),
            "special_ids": sorted(self._tokenizer.special_ids),
        }

    def _native(self) -> llguidance.LLTokenizer:
        """The tokenizer as the library wants it, made once."""
        with self._lock:
            if self._compiler is None:
                setup = self._setup()
                self._compiler = llguidance.LLTokenizer(setup["tokenizer"], setup["vocab_size"], setup["eos_ids"])
            return self._compiler

    def close(self) -> None:
        """End the workers; a grammar that is under way still comes, or fails."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            while not self._idle.empty():
                self._idle.get().close()

"""A worker process that tries grammars out, as seen from the server (started when a grammar is new, then kept)."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ostinato.engines.errors import OstinatoError

from .grammar_fault import told
from .grammar_source import Source
from .serve_limits import ServeLimits

START_SECONDS = 60.0
TRIAL_SHARE = 0.75  # of a grammar's time; the rest is for the ways, and for a machine that does other things, too
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG")  # no keys among them
_READ_BYTES = 2**16
_BUSY = "the machine is too busy to try a new grammar out: try again later"


class MaskBounds(NamedTuple):
    """What one mask may take, where the compiler's own bounds allow a second: more would hold everybody's step up.

    10,000 items take 2 ms, or 7 where rules are ambiguous; rules that repeat to the right need more with each token.
    """

    step_max_items: int = 10_000
    step_lexer_fuel: int = 50_000


MASK_BOUNDS = MaskBounds()


class TrialError(Exception):
    """Why a grammar can't be used."""


class GrammarsBusyError(OstinatoError):
    """Too many new grammars at once, or no processor's time for them: try again later."""


class WorkerEndedError(OstinatoError):
    """Somebody ended the worker: another one may do."""


class Tried(NamedTuple):
    """A grammar that held: its text in Lark's form, and how many bytes it takes once compiled."""

    text: str
    num_bytes: int


class Trial:
    """One worker. One caller at a time; `has_ended` then says whether another one must take its place."""

    def __init__(self, setup: Mapping[str, Any], limits: ServeLimits) -> None:
        self._seconds = limits.compile_seconds
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ostinato.runtime.grammar_worker"],  # not from the folder that we are in
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what native code says of a caller's grammar belongs in no log
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        )
        try:
            bounds = {"max_bytes": limits.compile_bytes, "max_seconds": limits.compile_seconds}
            bounds["trial_seconds"] = TRIAL_SHARE * limits.compile_seconds
            answer = self._ask({**setup, **bounds, "mask_bounds": MASK_BOUNDS._asdict()}, START_SECONDS)
        except OstinatoError as error:
            kind = WorkerEndedError if isinstance(error, WorkerEndedError) else OstinatoError
            raise kind(f"the worker that tries grammars out does not start: {error}") from None
        if "error" in answer:
            self.close()
            raise OstinatoError(f"grammars can't be used with this tokenizer: {answer['error']}")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def run(self, source: Source, seconds: float | None = None) -> Tried:
        """Try a grammar, for `seconds` where not all of its time is left. TrialError where it does not compile or takes
        too much, GrammarsBusyError where it got too little of a processor, WorkerEndedError.
        """
        seconds = self._seconds if seconds is None else seconds
        answer = self._ask({**source._asdict(), "seconds": TRIAL_SHARE * seconds}, seconds)
        if "busy" in answer:
            raise GrammarsBusyError(_BUSY)
        if "error" in answer:
            raise TrialError(answer["error"])
        if "fault" in answer:
            raise TrialError(told(answer["fault"], source))
        return Tried(answer["text"], answer["bytes"])

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # of what was not sent yet
                pipe.close()

    def _ask(self, question: Mapping[str, Any], seconds: float) -> Any:
        assert self._process.stdin is not None
        deadline = time.monotonic() + seconds
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return json.loads(self._line(deadline))

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.close()  # it ends a trial in less time than this: it hardly runs at all
                raise GrammarsBusyError(_BUSY)
            part = os.read(pipe, _READ_BYTES)
            if not part:
                raise self._ended()
            parts.append(part)
        return b"".join(parts)

    def _ended(self) -> WorkerEndedError:
        self.close()
        return WorkerEndedError("the worker that tries grammars out has ended: try again")

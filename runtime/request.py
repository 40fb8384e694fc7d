"""A request as the desk sees it: one row of work with its sampling parameters and its progress (made per request)."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from ostinato.engines.errors import RequestError
from ostinato.engines.sizes import MAX_LOGIT_BIAS, MAX_LOGPROBS
from ostinato.plugins.sampling_rows import I32

from .guide import Guide
from .timeline import Stage, Timeline

MAX_N = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 1024
SEED_BITS = 64
STEP_FAILED = "backend_failure"  # the code of an error that is the server's own

RANGES: Mapping[str, tuple[float, float]] = {  # of SamplingParams' fields where they are not None
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "n": (1, MAX_N),
    "min_tokens": (0, 2**31 - 1),
    "max_tokens": (0, 2**31 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "seed": (-(2 ** (SEED_BITS - 1)), 2**SEED_BITS - 1),
}
BIAS_RANGE = (-100.0, 100.0)
_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {  # of SamplingParams' fields, and their names for people
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        ((int, float), "a number"),
    ),
    **dict.fromkeys(("top_k", "min_tokens", "n"), ((int,), "an integer")),
    **dict.fromkeys(("seed", "max_tokens", "logprobs", "prompt_logprobs"), ((int, type(None)), "an integer or None")),
    **dict.fromkeys(("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"), ((bool,), "True or False")),
    **dict.fromkeys(("stop", "stop_token_ids", "logit_bias"), ((tuple, list), "a tuple")),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample and when to stop. Neutral defaults; `max_tokens` None means the rest of the context.

    `logprobs` None: none; 0: the chosen token's; k: the k best too. `prompt_logprobs` likewise for the prompt.
    Logprobs are the natural-log softmax after bias and penalties and before mask, temperature and truncation.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        """A wrong type must fail here, not in a step that other requests share."""
        given = [(name, value) for name, default in _DEFAULTS if (value := getattr(self, name)) is not default]
        for name, value in given:
            _is_a(name, value, *_TYPES[name])
        for name, value in given:
            if name in RANGES and value is not None:
                _in_range(name, value, *RANGES[name])
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", param="min_tokens")
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        for text in self.stop:
            _is_a("stop", text, (str,), "strings")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids, at most {MAX_STOP_IDS} are allowed",
                param="stop_token_ids",
            )
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop)} strings, at most {MAX_STOPS} are allowed", param="stop")
        if any(not text for text in self.stop):
            raise RequestError("stop has an empty string, which would end everything at once", param="stop")
        if any(len(text) > MAX_STOP_CHARS for text in self.stop):
            raise RequestError(f"a stop string exceeds {MAX_STOP_CHARS} characters", param="stop")

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed",
                param="logit_bias",
            )
        for pair in self.logit_bias:
            _is_a("logit_bias", pair, (tuple, list), "pairs of token id and number")
            if len(pair) != 2:
                raise RequestError(f"logit_bias has {len(pair)} values: give pairs", param="logit_bias")
            _is_a("logit_bias", pair[1], (int, float), "pairs of token id and number")
            _in_range("logit_bias", pair[1], *BIAS_RANGE)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_DEFAULTS = tuple((field.name, field.default) for field in fields(SamplingParams))


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} is {value}: give a number from {low} to {high}", param=name)


def _is_a(name: str, value: object, kinds: tuple[type, ...], wanted: str) -> None:
    if type(value) not in kinds and (not isinstance(value, kinds) or isinstance(value, bool)):
        raise RequestError(f"{name} has a {type(value).__name__}: give {wanted}", param=name, code="invalid_type")


def check_token_ids(name: str, ids: Iterable[Any], vocab_size: int) -> None:
    """The one validator of every id list that a caller can send."""
    ids = list(ids)
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return
    for token_id in ids:
        if type(token_id) is not int and not isinstance(token_id, int | np.integer):
            raise RequestError(f"{name} has a {type(token_id).__name__}: give token ids", param=name)
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{name} has token id {token_id}, the vocabulary is 0 to {vocab_size - 1}", param=name)


class Status(enum.Enum):
    WAITING = "waiting"  # no blocks; also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class TokenCounts:
    """How often each token occurs in a request that has penalties; kept in place while it lives."""

    prompt: I32  # [V]
    output: I32  # [V]
    num_counted: int = 0  # output tokens in `output` so far


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one call. `tokens` is prompt + output; `num_computed` of them have keys and values in blocks.

    Interval picture:   tokens: [0, num_computed) cached   [num_computed, len) to compute   then one is sampled.
    `seed` is never None here: a caller's own, or a fresh random one.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    max_tokens: int  # resolved: never None, prompt + max_tokens <= max_context
    seed: int
    choice: int = 0
    salt: str = ""
    priority: int = 0  # lower runs first
    stop_ids: frozenset[int] = frozenset()  # EOS set (unless ignore_eos) and stop_token_ids
    status: Status = Status.WAITING
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens served from the prefix cache at first admission
    num_preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)  # of the prompt's first tokens, so far
    counts: TokenCounts | None = None  # made when first sampled, if there are penalties
    guide: Guide | None = None
    num_planned: int = 0  # num_computed once every step in flight is done
    num_in_flight: int = 0  # steps in flight that hold a row of it
    pending_line: int = -1  # in the newest step in flight, the sampled line that its next row is fed from, or -1
    is_catching_up: bool = False  # from its start, or restart, until it samples its next token
    fault: Exception | None = None  # what its guide raised
    mask_seconds: float = 0.0  # of a processor, that its last mask took; 0 before there was one
    num_put_off: int = 0  # steps in a row that had no time for its mask
    num_rests: int = 0  # steps to come that will have none, either
    timeline: Timeline | None = None  # where its time goes, if somebody wants to know
    tenant: str = ""  # whose it is: tenants have shares of the rows, if that is configured

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def turn(self, stage: Stage) -> None:
        """Note that it comes to a stage."""
        if self.timeline is not None:
            self.timeline.turn(stage)

    @property
    def is_scored(self) -> bool:
        """Whether no prompt logprob is missing; once known they survive a preemption."""
        return self.params.prompt_logprobs is None or len(self.prompt_logprobs) == self.num_prompt

    @property
    def first_sampled(self) -> int:
        """The first position whose logits are still needed: position i predicts token i + 1."""
        return len(self.tokens) - 1 if self.is_scored else max(len(self.prompt_logprobs) - 1, 0)


class TokenLogprob(NamedTuple):
    """The logprob of a token and of the best alternatives, descending."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Event(NamedTuple):
    """What one step did for one request: at most one sampled token, and how it ended if it did.

    `finish`: None, or "stop" | "length" | "abort" | "error" (then `error` says why). `forced`: tokens that follow the
    sampled one because its guide allows nothing else; they were not sampled and have no logprobs.
    `prompt_logprobs` and `num_cached` come with a request's first event.
    """

    request_id: int
    token_id: int | None
    logprob: TokenLogprob | None
    finish: str | None
    error: RequestError | None = None
    num_cached: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    forced: tuple[int, ...] = ()

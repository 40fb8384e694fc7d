"""What the OpenAI endpoints share: strict types, sampling fields and checks (lines run per request)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    model_validator,
)

from ostinato.engines.errors import RequestError
from ostinato.engines.sizes import MAX_LOGIT_BIAS

from .request import MAX_STOP_IDS, SamplingParams
from .serve_limits import ServeLimits
from .wire_unserved import UNSERVED, Unserved

MAX_NAME_CHARS = 64
MAX_FIELDS = 256  # of one object
MAX_SALT_CHARS = 256
MAX_PRIORITY = 2**31 - 1
KIND = "kind:"  # begins a union's tag, which is no part of a body's path

BodyT = TypeVar("BodyT", bound="WireModel")
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # of a schema or a function


def check_size(table: dict[str, Any]) -> None:
    """ValueError where it has many times the fields that any of ours has: each would be a fault to report."""
    if len(table) > MAX_FIELDS:
        raise ValueError(f"this has {len(table)} fields, at most {MAX_FIELDS} are allowed")


def check_type(table: object, served: str, told: str) -> object:
    """The table; ValueError(told) where its `type` is a text, and not the one that is served."""
    if isinstance(table, dict) and isinstance(kind := table.get("type"), str) and kind != served:
        raise ValueError(told)
    return table


class WireModel(BaseModel):
    """Strict: no text as number, no true as 1, no 1.0 as integer, no infinities, no unknown fields.

    `unserved`: fields that are known, and refused unless they ask for nothing; where it `is_closed`, all others are.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)
    unserved: ClassVar[Mapping[str, Unserved]] = {}
    is_closed: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, table: object) -> object:
        if not isinstance(table, dict):
            return table
        check_size(table)
        return {name: value for name, value in table.items() if value is not None}


class StreamOptions(WireModel):
    """How a stream ends. There is no obfuscation, so only its absence may be asked for."""

    unserved: ClassVar[Mapping[str, Unserved]] = {"continuous_usage_stats": Unserved((False,))}

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _in_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _bounded(value: object) -> object:
    """Before its entries are looked at, each of which could be a fault to report."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"at most {MAX_LOGIT_BIAS} entries are allowed")
    return value


class SamplingFields(WireModel):
    """The fields that every generating endpoint has, None where unset; the second group is not all OpenAI's there."""

    unserved: ClassVar[Mapping[str, Unserved]] = UNSERVED

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_bounded)] = Field(default_factory=dict)
    seed: int | None = None
    stop: Annotated[list[str], FailFast(), BeforeValidator(_in_list)] = Field(default_factory=list)
    user: str | None = None  # OpenAI's mark for abuse reports; nothing here depends on it

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list, max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=MAX_SALT_CHARS)
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None  # lower runs first
    timings: bool | None = None  # tell in the answer where its time went


class SamplingBody(SamplingFields):
    """The fields that completions and chats share."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None


_COPIED = frozenset({
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
})  # fmt: skip


def clipped(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


class renamed:  # noqa: N801 (a block, and no generator: it runs for every call)
    """Errors inside name a field as this body calls it."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, RequestError) and (outer := self._names.get(inner := error.param or "")) is not None:
            error.param = outer
            if "_" in inner or str(error).startswith(f"{inner} "):  # else it is a word of the sentence
                error.args = (str(error).replace(inner, outer),)


def check_stream(stream: bool | None, options: WireModel | None) -> None:
    if options is not None and not stream:
        raise RequestError(
            "stream_options needs stream true: set it, or leave stream_options out", param="stream_options"
        )


def check_top_logprobs(count: int | None, limits: ServeLimits) -> None:
    if not 0 <= (count or 0) <= limits.max_top_logprobs:
        raise RequestError(f"top_logprobs is out of range: give 0 to {limits.max_top_logprobs}", param="top_logprobs")


class Text(Protocol):
    """A part of a turn."""

    @property
    def text(self) -> str: ...


def plain_turn(role: str, parts: Sequence[Text]) -> dict[str, Any]:
    """What a chat template reads: text parts joined, developer by its older name."""
    return {"role": "system" if role == "developer" else role, "content": "".join(part.text for part in parts)}


def wants_usage(body: SamplingBody) -> bool:
    """Whether a stream ends with a usage chunk."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def sampling_params(
    body: SamplingFields, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """The desk's parameters; RequestError where a value is out of range."""
    given: list[tuple[str, Any]] = [
        ("max_tokens", max_tokens), ("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs),
    ]  # fmt: skip
    given += [(name, value) for name in body.model_fields_set & _COPIED if (value := getattr(body, name)) is not None]
    if not (body.stop or body.stop_token_ids or body.logit_bias):
        return _params(frozenset(given))
    return SamplingParams(
        **dict(given),
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        logit_bias=_logit_bias(body.logit_bias),
    )


@lru_cache(maxsize=256)
def _params(given: frozenset[tuple[str, Any]]) -> SamplingParams:
    """They do not change, and most calls of one program have the same."""
    return SamplingParams(**dict(given))


def _logit_bias(table: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, value in table.items():
        # int() would also take " 7", "1_0" and non-ASCII digits; one spelling per id keeps entries from merging.
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or key != str(int(key)):
            raise RequestError(
                f"logit_bias has key {clipped(key, MAX_NAME_CHARS)!r}: give token ids in decimal", param="logit_bias"
            )
        pairs[int(key)] = value
    return tuple(pairs.items())

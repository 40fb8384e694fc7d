"""Tiny random checkpoints as transformers saves them: one folder an architecture, all weights and biases random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 320
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model in float32, norms and biases random too."""
    config_class, model_class = _CLASSES[architecture]
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config_class(**(_SHAPE | overrides))).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if name.endswith("norm.weight") else 0.2 * noise)
    return model


def write_tiny(folder: Path, architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """Save such a model and a byte-level tokenizer into `folder`; returns the model."""
    model = tiny_model(architecture, seed, **overrides)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return model


def write_byte_tokenizer(folder: Path) -> None:
    """Every byte is a token (ids 0 to 255 by byte value), then <|im_start|> 256 and <|im_end|> 257."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = byte_letters()
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    table = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(table))


def byte_letters() -> dict[int, str]:
    """The visible letter that byte-level tokenizers write each byte as."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + index) for index, byte in enumerate(hidden)}

"""Turn the published GGUF into a Hugging Face folder; runs in a peer's environment, once at `peers.py --setup`.

usage: python peer_model.py GGUF FOLDER      (needs torch, transformers, gguf, accelerate)
"""

from __future__ import annotations

import sys
from pathlib import Path


def huggingface_from_gguf(source: Path, folder: Path) -> None:
    """Dequantize the GGUF and save it as bf16 safetensors with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    huggingface_from_gguf(Path(sys.argv[1]), Path(sys.argv[2]))

"""The float32 reference: transformers on the checkpoint as published, dequantized (offline)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ostinato.engines.errors import CheckpointError

from .checkpoint import Checkpoint
from .verify import F32, Reference


def load_reference(checkpoint: Checkpoint) -> Reference:
    """A function from a text's ids to its logits [length, V]."""
    path = checkpoint.path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path.is_dir():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        else:
            # The GGUF's config by transformers; its numbers by our reader, one tensor at a time.
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
            _load(model.float(), checkpoint)
    model.eval()

    def logits(text: Sequence[int]) -> F32:
        with torch.inference_mode():
            rows: F32 = model(torch.tensor([list(text)])).logits[0].numpy()
        return rows

    return logits


def _load(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    parameters = dict(model.named_parameters())
    if unset := sorted(parameters.keys() - checkpoint.shapes.keys()):
        raise CheckpointError(f"{checkpoint.path} has no {', '.join(unset)}, which transformers wants")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(checkpoint.read(name)))


def chat_prompts(tokenizer_dir: Path, questions: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Each question as a chat turn (as plain text where there is no chat template), if it has at most `max_tokens`."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    prompts: list[list[int]] = []
    for question in questions:
        text = question
        if tokenizer.chat_template:
            turn = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"])
    return [prompt for prompt in prompts if len(prompt) <= max_tokens]

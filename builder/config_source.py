"""The decoder that a recipe's checkpoint describes, read without its weights (offline)."""

from __future__ import annotations

import json
from pathlib import Path

from ostinato.engines.errors import CheckpointError
from ostinato.engines.recipe import Recipe

from .config import DecoderConfig
from .gguf_checkpoint import read_gguf
from .hf_config import config_from_hf
from .source import resolve_source


def decoder_config(recipe: Recipe, config: Path | None = None) -> DecoderConfig:
    """From `config`, a Hugging Face config.json, in place of the recipe's checkpoint; else from that checkpoint.

    Raises CheckpointError.
    """
    if config is None:
        source = resolve_source(recipe.checkpoint, recipe.sha256)
        if source.is_file():
            return read_gguf(source).config  # maps the file: only its metadata is touched
        config = source / "config.json"
    try:
        table = json.loads(config.read_text())
    except OSError as error:
        raise CheckpointError(f"{config} can't be read ({error.strerror}): give a config.json") from None
    except ValueError as error:
        raise CheckpointError(f"{config} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{config} holds no JSON object: give a Hugging Face config.json")
    return config_from_hf(table, str(config))

"""The tokenizer of a bundle: tokenizer.json and one tokenizer_config.json with the chat template in it (offline)."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

from ostinato.engines.errors import CheckpointError

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {  # GGUF's name of a pre-tokenizer → how many digits stay together
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}


def write_tokenizer(checkpoint: Path, folder: Path) -> None:
    """Write both files into `folder` from a Hugging Face folder or a GGUF."""
    if checkpoint.is_dir():
        _copy(checkpoint, folder)
    else:
        _from_gguf(checkpoint, folder)


def _copy(checkpoint: Path, folder: Path) -> None:
    if not (checkpoint / TOKENIZER).is_file():
        raise CheckpointError(
            f"{checkpoint} has no {TOKENIZER}: save the tokenizer in its fast form, "
            "with AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    shutil.copyfile(checkpoint / TOKENIZER, folder / TOKENIZER)
    path = checkpoint / CONFIG
    table = json.loads(path.read_text()) if path.is_file() else {}
    if (checkpoint / TEMPLATE).is_file():
        table["chat_template"] = (checkpoint / TEMPLATE).read_text()
    _write_config(folder, table)


def _from_gguf(checkpoint: Path, folder: Path) -> None:
    from gguf import GGUFReader

    from .gguf_checkpoint import control_tokens

    reader = GGUFReader(checkpoint)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    model = fields.get("tokenizer.ggml.model")
    tokenizer = _byte_pairs(fields, checkpoint) if model == "gpt2" else _converted(checkpoint)
    tokens = fields["tokenizer.ggml.tokens"]
    # Control tokens are special: skipped when text is decoded, and never made by ordinary text.
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control_tokens(fields)]
    )
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token") and bos is not None:
        begin = (tokens[bos], bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin[0]} $A", pair=f"{begin[0]} $A {begin[0]} $B", special_tokens=[begin]
        )
    tokenizer.save(str(folder / TOKENIZER), pretty=False)
    table: dict[str, Any] = {"add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token"))}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if (index := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            table[name] = tokens[index]
    if template := fields.get("tokenizer.chat_template"):
        table["chat_template"] = template
    _write_config(folder, table)


def _byte_pairs(fields: dict[str, Any], checkpoint: Path) -> Tokenizer:
    """Byte-level BPE; the file only names its way to cut text into words, so an unknown name is refused."""
    from tokenizers.models import BPE

    kind = fields.get("tokenizer.ggml.pre")
    vocab = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    left_right = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]]
    merges = [(left, right) for left, right in left_right]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=kind == "llama-bpe"))
    if kind in ("gpt-2", "smollm"):
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words]) if kind == "smollm" else words
    elif kind in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[kind]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        if kind == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    else:
        raise CheckpointError(
            f"{checkpoint} cuts words as {kind!r}: this builder knows gpt-2, smollm, {', '.join(_SPLITS)}"
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _converted(checkpoint: Path) -> Tokenizer:
    """Any other kind of tokenizer, as transformers converts it."""
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.parent, gguf_file=checkpoint.name)
    return Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())


def _write_config(folder: Path, table: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(table, indent=1, sort_keys=True, ensure_ascii=False) + "\n")

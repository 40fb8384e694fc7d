"""The bytes of every token, read from a tokenizer's vocabulary and decoder (made once at start)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SPACE_MARK = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_ONE_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """A tokenizer whose text is its tokens' bytes, one after the other, as UTF-8.

    `every` maps a token id to its bytes, `shown` leaves the special tokens out. Ids in neither have no text.
    `strips_space`: the decoder takes one leading space off a whole text.
    """

    every: Mapping[int, bytes]
    shown: Mapping[int, bytes]
    strips_space: bool

    def pieces(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        return self.shown if skip_special_tokens else self.every

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of a whole id list; each maximal ill-formed part is one U+FFFD."""
        pieces = self.pieces(skip_special_tokens)
        raw = b"".join([pieces.get(token_id, b"") for token_id in ids])
        if self.strips_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")


def token_bytes_of(decoder: Any, tokens: Mapping[int, str], special_ids: frozenset[int]) -> TokenBytes | None:
    """The table for a `decoder` (as in tokenizer.json) that works token by token, or None for any other kind.

    Two kinds do: byte-level BPE, and SentencePiece pieces with byte fallback.
    """
    steps = _steps(decoder)
    strips_space = steps[-1:] == [_STRIP_ONE_SPACE]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        alphabet = _byte_alphabet()
        every = {token_id: _byte_level(token, alphabet) for token_id, token in tokens.items()}
    elif (steps[:-1] if strips_space else steps) == _SENTENCEPIECE:
        every = {token_id: _sentencepiece(token) for token_id, token in tokens.items()}
    else:
        return None
    shown = {token_id: raw for token_id, raw in every.items() if token_id not in special_ids}
    return TokenBytes(every, shown, strips_space)


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in for every byte: itself where it prints, else the next code point from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # an added token is written as plain text
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if match := _BYTE_PIECE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()

"""Incremental text of a growing token list: deltas whose join is the one-shot decode (called per step).

    prompt ids │ output ids …            decode(prompt + output) = prompt text │ what push and finish return

A character that begins in the prompt and ends in the output is output, whole; its U+FFFD, if it never completes, is the
prompt's, or with `keeps_mark` output too: then the prompt is shown without it. A leading space is dropped once a text,
where the tokenizer does so.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from .token_bytes import TokenBytes
from .tokenizer import Tokenizer

MARK = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES = 4
_PROMPT_WINDOW = 8
_MAX_WINDOW = 64


class Detokenizer(Protocol):
    """Text of one choice. Holds back an unfinished character only; knows the prompt, and never returns any of it.

    `num_marks`: characters, all U+FFFD, at the end of the prompt's text that the output may turn into others.
    """

    num_marks: int

    def push(self, ids: Sequence[int]) -> str:
        """The text that these output tokens complete."""
        ...

    def push_one(self, token_id: int) -> str:
        """The same of a single one."""
        ...

    @property
    def holds(self) -> bool:
        """Whether the last token pushed has a character that is not whole yet."""
        ...

    def finish(self) -> str:
        """What was held: an unfinished character as one U+FFFD, or nothing. Called once, after the last push."""
        ...


def detokenizer(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True, *, keeps_mark: bool = False
) -> Detokenizer:
    """The kind for this tokenizer."""
    if tokenizer.table is not None:
        return ByteDetokenizer(tokenizer.table, prompt_ids, skip_special_tokens, keeps_mark)
    return WindowDetokenizer(tokenizer, prompt_ids, skip_special_tokens, keeps_mark)


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: exact, and one table look-up a token."""

    def __init__(
        self, table: TokenBytes, prompt_ids: Sequence[int], skip_special_tokens: bool, keeps_mark: bool
    ) -> None:
        self._pieces = table.pieces(skip_special_tokens)
        self._held = b""  # of a character that is not whole
        tail = self._last_bytes(prompt_ids)
        self._decode(tail)
        self._strip_space = table.strips_space and not tail
        self.num_marks = int(self.holds)
        self._drop_mark = self.holds and not keeps_mark

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """Enough of the prompt's end to hold an unfinished character; empty only where the whole prompt has no text."""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._pieces.get(token_id, b"") + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        return tail

    def push(self, ids: Sequence[int]) -> str:
        raw = b"".join([self._pieces.get(token_id, b"") for token_id in ids])
        if self._strip_space and raw:
            self._strip_space = False
            raw = raw.removeprefix(b" ")
        if self._held or not raw.isascii():
            return self._unmarked(self._decode(self._held + raw))
        return raw.decode("ascii")

    def push_one(self, token_id: int) -> str:
        raw = self._pieces.get(token_id, b"")
        if self._held or self._strip_space or not raw.isascii():
            return self.push((token_id,))
        return raw.decode("ascii")

    def _decode(self, raw: bytes, is_last: bool = False) -> str:
        text, num_whole = utf_8_decode(raw, "replace", is_last)
        self._held = raw[num_whole:]
        return text

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def finish(self) -> str:
        return self._unmarked(self._decode(self._held, True))

    def _unmarked(self, text: str) -> str:
        if self._drop_mark and text:
            self._drop_mark = False
            return text.removeprefix(MARK)
        return text


class WindowDetokenizer:
    """For any other decoder: decodes the last few tokens again and returns what is new.

    The window always starts with tokens that have text, so that what a decoder does to a first token stays inside the
    part that was already sent. A trailing U+FFFD may be half a character: it is held, for `_MAX_WINDOW` tokens at most.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool, keeps_mark: bool
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        width = _PROMPT_WINDOW
        while not (text := self._decode(prompt_ids[-width:])).strip(MARK) and width < len(prompt_ids):
            width *= 2
        self._ids = list(prompt_ids[-width:])
        self._num_old = len(self._ids)  # [0, num_old) sent with an earlier push, [num_old, len) not wholly
        self._num_sent = len(text.rstrip(MARK))  # characters of the window's text
        self.holds = text.endswith(MARK)
        self.num_marks = len(text) - self._num_sent
        self._drop_mark = self.holds and not keeps_mark

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        text = self._decode(self._ids)
        whole = text if len(self._ids) - self._num_old > _MAX_WINDOW else text.rstrip(MARK)
        self.holds = len(whole) < len(text)
        delta = self._take(whole)
        if delta and not self.holds:
            self._shrink()
        return delta

    def push_one(self, token_id: int) -> str:
        return self.push((token_id,))

    def finish(self) -> str:
        return self._take(self._decode(self._ids))

    def _take(self, text: str) -> str:
        delta = text[self._num_sent :]
        if delta:
            self._num_sent = len(text)
            if self._drop_mark:
                self._drop_mark = False
                return delta.removeprefix(MARK)
        return delta

    def _shrink(self) -> None:
        """Everything is sent: the tokens of the last delta are context enough, if they have text of their own."""
        newest = self._ids[self._num_old :]
        if text := self._decode(newest):
            self._ids, self._num_sent = newest, len(text)
        self._num_old = len(self._ids)

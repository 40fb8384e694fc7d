"""Logprobs in OpenAI's two shapes (lines run per token where they are asked for)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from .request import TokenLogprob
from .tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no -inf


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """{"content": one entry a token, each with the k best in order; "refusal": null}"""
    content = [
        {
            **_chat_entry(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_entry(tokenizer, token_id, logprob) for token_id, logprob in entry.top],
        }
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text, raw = tokenizer.token_text(token_id)
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}


class LegacyLogprobs:
    """The parallel lists of one choice of /v1/completions. Offsets count characters from the start of its text.

    `start` is the offset of the first token: below 0 where the text lacks a BOS that the lists have.
    """

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = start

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, list[Any]]:
        """The lists for the next tokens; None stands for a first token, which nothing predicts."""
        texts = [self._tokenizer.token_text(token_id) for token_id in token_ids]
        offsets = []
        for _, raw in texts:
            offsets.append(max(self._offset, 0))
            self._offset += len(self._utf8.decode(raw))
        return {
            "tokens": [text for text, _ in texts],
            "token_logprobs": [None if entry is None else max(entry.logprob, LOWEST_LOGPROB) for entry in logprobs],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The k best and the token itself, by text; a later token of equal text goes by its id."""
        table: dict[str, float] = {}
        ids = [token_id for token_id, _ in entry.top]
        own = [] if entry.token_id in ids else [(entry.token_id, entry.logprob)]
        for token_id, logprob in (*entry.top, *own):
            text, _ = self._tokenizer.token_text(token_id)
            table[text if text not in table else f"token_id:{token_id}"] = max(logprob, LOWEST_LOGPROB)
        return table

"""Logprobs in OpenAI's two shapes (lines run per token where they are asked for)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .detokenizer import Detokenizer
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


class Offsets:
    """Where the texts of tokens begin in a text that is sent, in characters; asked for each token once, in order.

    A token whose text shares a character with the one before begins with that character. One that has no text there,
    being hidden or cut away by a stop string, is where the text goes on.
    """

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer, start: int) -> None:
        """`start`: where `detokenizer`'s text begins, below 0 where the first of it is not sent."""
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._place = start

    def take(self, token_ids: Sequence[int], end: int) -> list[int]:
        """`end`: the length of the text that is sent with these tokens or was before."""
        offsets = []
        for token_id in token_ids:
            shown, own = self._detokenizer.push_one(token_id), self._tokenizer.token_text(token_id).text
            # Before its own text an unfinished character may come, that it has just ended.
            ahead = len(shown) - len(own) if own and shown.endswith(own) else 0
            offsets.append(min(max(self._place + ahead, 0), end))
            self._place += len(shown)
        return offsets


def legacy_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], offsets: list[int]
) -> dict[str, list[Any]]:
    """The parallel lists of /v1/completions; None stands for a first token, which nothing predicts."""
    return {
        "tokens": [tokenizer.token_text(token_id).text for token_id in token_ids],
        "token_logprobs": [None if entry is None else max(entry.logprob, LOWEST_LOGPROB) for entry in logprobs],
        "top_logprobs": [None if entry is None else _top(tokenizer, entry) for entry in logprobs],
        "text_offset": offsets,
    }


def _top(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float]:
    """The k best and the token itself, by text; a later token of equal text goes by its id."""
    table: dict[str, float] = {}
    ids = [token_id for token_id, _ in entry.top]
    own = [] if entry.token_id in ids else [(entry.token_id, entry.logprob)]
    for token_id, logprob in (*entry.top, *own):
        text, _ = tokenizer.token_text(token_id)
        table[text if text not in table else f"token_id:{token_id}"] = max(logprob, LOWEST_LOGPROB)
    return table

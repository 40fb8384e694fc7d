"""Logprobs on the wire: entries of equal text stay apart, bytes are right, and the chosen token is always there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ostinato.runtime.detokenizer import detokenizer
from ostinato.runtime.request import TokenLogprob
from ostinato.runtime.tokenizer import Tokenizer
from ostinato.runtime.wire_logprobs import Offsets, chat_logprobs, legacy_logprobs
from tests.tokenizers import BOS_PIECE, FIRST_BYTE_PIECE, FIRST_PIECE, sentencepiece

PIECES = ["▁true", "true", "▁", "<s>x"]
SPACE_TRUE, TRUE, SPACE = FIRST_PIECE, FIRST_PIECE + 1, FIRST_PIECE + 2
E2, SPACE_BYTE = FIRST_BYTE_PIECE + 0xE2, FIRST_BYTE_PIECE + 0x20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(sentencepiece(tmp_path_factory.mktemp("pieces"), PIECES))


TOP = ((SPACE_TRUE, -0.1), (SPACE, -1.0), (E2, -2.0), (SPACE_BYTE, -3.0), (TRUE, -math.inf))


def test_chat_entries_are_one_a_token_in_order_with_bytes(tokenizer: Tokenizer) -> None:
    for chosen, logprob in ((SPACE_TRUE, -0.1), (BOS_PIECE, -9.0)):
        (entry,) = chat_logprobs(tokenizer, [TokenLogprob(chosen, logprob, TOP)])["content"]
        assert entry["logprob"] == logprob
        assert [item["bytes"] for item in entry["top_logprobs"]] == [[*b" true"], [32], [0xE2], [32], [*b"true"]]
        assert [item["logprob"] for item in entry["top_logprobs"]] == [-0.1, -1.0, -2.0, -3.0, -9999.0]
        assert entry["top_logprobs"][2]["token"] == "bytes:\\xe2"


def test_legacy_entries_of_equal_text_stay_apart(tokenizer: Tokenizer) -> None:
    entries = [TokenLogprob(SPACE_TRUE, -0.1, TOP), TokenLogprob(BOS_PIECE, -9.0, TOP)]
    taken = legacy_logprobs(tokenizer, [SPACE_TRUE, BOS_PIECE], entries, [0, 5])
    best = {" true": -0.1, " ": -1.0, "bytes:\\xe2": -2.0, f"token_id:{SPACE_BYTE}": -3.0, "true": -9999.0}
    assert taken["top_logprobs"] == [best, {**best, "<s>": -9.0}]
    assert taken["tokens"] == [" true", "<s>"]
    assert taken["token_logprobs"] == [-0.1, -9.0]


def test_legacy_without_alternatives_and_for_a_first_token(tokenizer: Tokenizer) -> None:
    taken = legacy_logprobs(tokenizer, [TRUE, TRUE], [None, TokenLogprob(TRUE, -1.0, ())], [0, 4])
    assert (taken["token_logprobs"], taken["top_logprobs"]) == ([None, -1.0], [None, {"true": -1.0}])


def offsets(tokenizer: Tokenizer, start: int, prompt: Sequence[int] = (), skip: bool = True) -> Offsets:
    return Offsets(tokenizer, detokenizer(tokenizer, prompt, skip), start)


def test_offsets_skip_a_bos_that_the_text_lacks_and_count_whole_characters(tokenizer: Tokenizer) -> None:
    euro = [FIRST_BYTE_PIECE + byte for byte in "€".encode()]
    places = offsets(tokenizer, -len("<s>"), skip=False)
    text = "true€true"
    assert places.take([BOS_PIECE, TRUE, *euro, TRUE], len(text)) == [0, 0, 4, 4, 4, 5]
    assert text[5:] == "true"
    assert places.take([TRUE], len(text) + 4) == [9]


def test_offsets_are_of_the_text_that_is_sent(tokenizer: Tokenizer) -> None:
    for prompt, text in (((), "true true"), ((TRUE,), " true true")):  # the first space is the prompt's affair
        places = offsets(tokenizer, 0, prompt).take([SPACE_TRUE, BOS_PIECE, SPACE_TRUE], len(text))
        assert places == [0, len(text) - 5, len(text) - 5]
    broken = offsets(tokenizer, 0, (TRUE,)).take([E2, TRUE, E2], len("\ufffdtrue\ufffd"))
    assert broken == [0, 1, 5]
    cut = offsets(tokenizer, 0, (TRUE,)).take([TRUE, TRUE, TRUE], len("truetr"))
    assert cut == [0, 4, 6]

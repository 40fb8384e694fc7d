"""Streams against one-shot decodes by the tokenizers library: same text for every split, and nothing of the prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from ostinato.runtime.detokenizer import detokenizer
from ostinato.runtime.tokenizer import Tokenizer
from tests.tokenizers import (
    BOS_PIECE,
    EOS_PIECE,
    FIRST_BYTE_PIECE,
    FIRST_PIECE,
    METASPACE,
    SYS,
    byte_level,
    sentencepiece,
    smollm2,
    wordpiece,
)

MARK = "\N{REPLACEMENT CHARACTER}"
NUM_LISTS = 5000
INTERVALS = (1, 2, 8)
PIECES = ["▁", "▁lead", "▁x", "y", "▁z", "<tag>", "▁word", "▁▁", "é", "日本", "▁true", "true", "."]
EMOJI = "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{MICROSCOPE}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}"
Decode = Callable[[Sequence[int], bool], str]


def expected(decode: Decode, prompt: list[int], output: list[int], skip: bool) -> str:
    """decode(prompt + output) minus decode(prompt); a character that the output completes is output."""
    before, whole = decode(prompt, skip), decode([*prompt, *output], skip)
    if whole.startswith(before):
        return whole[len(before) :]
    assert before.endswith(MARK)
    assert whole.startswith(before[:-1])
    return whole[len(before) - 1 :]


def check(tokenizer: Tokenizer, decode: Decode, ids: list[int], rng: random.Random) -> None:
    """Every interval gives the one-shot text, and after every push nothing but an unfinished character is missing."""
    skip = rng.random() < 0.7
    cut = rng.randint(0, len(ids))
    prompt, output = ids[:cut], ids[cut:]
    right = expected(decode, prompt, output, skip)
    for interval in INTERVALS:
        stream = detokenizer(tokenizer, prompt, skip)
        joined = ""
        for start in range(0, len(output), interval):
            joined += stream.push(output[start : start + interval])
            assert expected(decode, prompt, output[: start + interval], skip) in (joined, joined + MARK)
        assert joined + stream.finish() == right


def random_characters(rng: random.Random, count: int) -> bytes:
    """UTF-8 of every width, now and then broken."""
    raw = b""
    for _ in range(count):
        raw += chr(rng.choice([*b"ab .", 0xE9, 0x20AC, 0x65E5, 0x200D, 0xFFFD, 0x1F469, 0x1F52C])).encode()
        if rng.random() < 0.2:
            raw = raw[: -rng.randint(1, 2)]
        if rng.random() < 0.1:
            raw += bytes([rng.choice([0x80, 0xC0, 0xE2, 0xED, 0xA0, 0xF0, 0xF4, 0x90, 0xFF])])
    return raw


@pytest.mark.model
def test_the_real_tokenizer_streams_what_it_decodes_at_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer(smollm2(tmp_path))
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    byte_ids = [library.token_to_id(char) for char in byte_alphabet()]
    rng = random.Random(1)
    for _ in range(NUM_LISTS):
        ids: list[int] = []
        for _ in range(rng.randint(0, 4)):
            kind = rng.random()
            if kind < 0.4:
                ids += [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 4))]
            elif kind < 0.5:
                ids += [rng.randrange(17), tokenizer.vocab_size + 5]
            else:
                known = (byte_ids[byte] for byte in random_characters(rng, rng.randint(1, 3)))
                ids += [token_id for token_id in known if token_id is not None]
        check(tokenizer, lambda ids, skip: library.decode(ids, skip_special_tokens=skip), ids, rng)


def byte_alphabet() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def test_a_byte_level_tokenizer_streams_what_it_decodes_at_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path, {300: "ABC", 301: "a €"}))
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    rng = random.Random(2)
    for _ in range(NUM_LISTS):
        ids = list(random_characters(rng, rng.randint(0, 10)))
        for _ in range(rng.randint(0, 3)):
            ids.insert(rng.randint(0, len(ids)), rng.choice([SYS, 300, 301, 9999]))
        check(tokenizer, lambda ids, skip: library.decode(ids, skip_special_tokens=skip), ids, rng)


@pytest.mark.parametrize("strips", [True, False])
def test_a_sentencepiece_tokenizer_streams_what_it_decodes_at_once(tmp_path: Path, strips: bool) -> None:
    tokenizer, library = sentencepiece_pair(tmp_path, strips=strips)

    def decode(ids: Sequence[int], skip: bool) -> str:
        """The library's text, but one mark for each ill-formed part of a run of byte pieces, where it has more."""
        runs: list[bytes | list[int]] = []
        for token_id in ids:
            if skip and token_id in (BOS_PIECE, EOS_PIECE):
                continue
            if FIRST_BYTE_PIECE <= token_id < FIRST_PIECE:
                before = runs.pop() if runs and isinstance(runs[-1], bytes) else b""
                assert isinstance(before, bytes)
                runs.append(before + bytes([token_id - FIRST_BYTE_PIECE]))
            else:
                runs.append([token_id])
        # "y" in front keeps the library from taking the space off each part.
        anchor = FIRST_PIECE + PIECES.index("y")
        parts = [
            run.decode("utf-8", "replace")
            if isinstance(run, bytes)
            else library.decode([anchor, *run], skip_special_tokens=skip)[1:]
            for run in runs
        ]
        text = "".join(parts).removeprefix(" ") if strips else "".join(parts)
        theirs = library.decode(ids, skip_special_tokens=skip)
        assert (theirs == text) if MARK not in theirs else theirs.count(MARK) >= text.count(MARK)
        return text

    rng = random.Random(3)
    for _ in range(NUM_LISTS):
        ids: list[int] = []
        for _ in range(rng.randint(0, 5)):
            if rng.random() < 0.6:
                ids += [FIRST_PIECE + rng.randrange(len(PIECES)) for _ in range(rng.randint(1, 3))]
            elif rng.random() < 0.3:
                ids.append(rng.choice([BOS_PIECE, EOS_PIECE, 9999]))
            else:
                ids += [FIRST_BYTE_PIECE + byte for byte in random_characters(rng, rng.randint(1, 2))]
        check(tokenizer, decode, ids, rng)


def sentencepiece_steps(num_spaces: int) -> list[dict[str, Any]]:
    return [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": num_spaces, "stop": 0},
    ]


def sentencepiece_pair(folder: Path, strips: bool = True) -> tuple[Tokenizer, Library]:
    steps = sentencepiece_steps(1)
    sentencepiece(folder, PIECES, {"type": "Sequence", "decoders": steps if strips else steps[:3]})
    return Tokenizer(folder), Library.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("kind", ["metaspace", "wordpiece", "strips two spaces"])
def test_other_decoders_stream_what_they_decode_at_once(tmp_path: Path, kind: str) -> None:
    byte_pieces = [[FIRST_BYTE_PIECE + byte for byte in char.encode()] for char in "é€👩"]
    words = ["play", "##ing", "##s", ".", "do", "n't", "'s", "##" + MARK]
    if kind == "wordpiece":
        tokenizer = Tokenizer(wordpiece(tmp_path, words))
        choices = [[token_id] for token_id in range(len(words) + 2)]
        blanks = [1]
    else:
        decoder = METASPACE if kind == "metaspace" else {"type": "Sequence", "decoders": sentencepiece_steps(2)}
        tokenizer = Tokenizer(sentencepiece(tmp_path, [*PIECES, "a" + MARK, MARK], decoder))
        choices = [[FIRST_PIECE + i] for i in range(len(PIECES) + 2)]
        choices += byte_pieces if kind != "metaspace" else []
        blanks = [BOS_PIECE, EOS_PIECE, FIRST_PIECE]
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.table is None
    rng = random.Random(4)
    for _ in range(NUM_LISTS // 5):
        groups = [rng.choice(choices) for _ in range(rng.randint(0, 20))]
        for _ in range(rng.randint(0, 2)):
            groups.insert(rng.randint(0, len(groups)), [rng.choice(blanks)] * rng.randint(1, 12))
        ids = [token_id for group in groups for token_id in group]
        skip, cut = rng.random() < 0.7, rng.randint(0, len(ids))
        right = library.decode(ids, skip_special_tokens=skip)
        before = library.decode(ids[:cut], skip_special_tokens=skip)
        if before.endswith(MARK):
            continue  # the mark could be half a character
        for interval in INTERVALS:
            stream = detokenizer(tokenizer, ids[:cut], skip)
            deltas = [stream.push(ids[start : start + interval]) for start in range(cut, len(ids), interval)]
            assert before + "".join(deltas) + stream.finish() == right


def test_marks_without_end_are_not_held_without_end(tmp_path: Path) -> None:
    tokenizer = Tokenizer(sentencepiece(tmp_path, [MARK], METASPACE))
    stream = detokenizer(tokenizer, [])
    shown = "".join(stream.push([FIRST_PIECE]) for _ in range(1000))
    assert len(shown) > 900
    assert shown + stream.finish() == MARK * 1000


def test_no_half_character_is_shown(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    text = EMOJI + "ď"
    stream = detokenizer(tokenizer, list(b"x"))
    deltas = [stream.push([byte]) for byte in text.encode()]
    assert MARK not in "".join(deltas)
    assert "".join(deltas) + stream.finish() == text
    assert max(map(len, deltas)) == 1


def test_a_prompt_that_ends_inside_a_character_stays_hidden(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    prompt = [*b"SECRET ", 240, 159]
    stream = detokenizer(tokenizer, prompt)
    assert [stream.push([byte]) for byte in (0x98, 0x80, 0x21)] == ["", "😀", "!"]
    never_completed = detokenizer(tokenizer, prompt)
    assert never_completed.push(list(b"a")) + never_completed.finish() == "a"
    cut_short = detokenizer(tokenizer, prompt)
    assert cut_short.push([0x98]) + cut_short.finish() == ""


def test_an_unfinished_tail_is_one_mark(tmp_path: Path) -> None:
    for name in ("bytes", "pieces"):
        (tmp_path / name).mkdir()
    for tokenizer, shift in (
        (Tokenizer(byte_level(tmp_path / "bytes")), 0),
        (sentencepiece_pair(tmp_path / "pieces")[0], FIRST_BYTE_PIECE),
    ):
        ids = [byte + shift for byte in "€".encode() + b"\xe2\x82"]
        stream = detokenizer(tokenizer, [])
        assert "".join(stream.push([token_id]) for token_id in ids) == "€"
        assert stream.finish() == MARK
        assert tokenizer.decode(ids) == "€" + MARK


@pytest.mark.parametrize("interval", [1, 2, 3, 8])
def test_spaces_of_pieces_survive_every_chunking(tmp_path: Path, interval: int) -> None:
    tokenizer, library = sentencepiece_pair(tmp_path)
    output = [FIRST_PIECE + PIECES.index(piece) for piece in ("▁", "▁lead", "▁x", "y", "▁", "▁z")]
    a = [FIRST_BYTE_PIECE + ord("a")]
    for prompt, right in (([], " lead xy  z"), (a, "  lead xy  z"), ([BOS_PIECE], " lead xy  z")):
        stream = detokenizer(tokenizer, prompt)
        text = "".join(stream.push(output[start : start + interval]) for start in range(0, len(output), interval))
        assert text + stream.finish() == right
        assert library.decode(prompt + output) == ("a" if prompt == a else "") + right
    tagged = [FIRST_PIECE + PIECES.index(piece) for piece in ("<tag>", "▁word")]
    stream = detokenizer(tokenizer, [], skip_special_tokens=False)
    assert stream.push(tagged[:1]) + stream.push(tagged[1:]) == "<tag> word"

"""Philox against the published known answers of its authors, and the uniforms made from it."""

from __future__ import annotations

import numpy as np

from ostinato.plugins.philox import philox4x32, uniforms

_PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


def test_published_known_answers() -> None:
    ones = 0xFFFFFFFF
    counter = np.array([[0] * 4, [ones] * 4, _PI[:4]], np.uint32)
    key = np.array([[0] * 2, [ones] * 2, _PI[4:]], np.uint32)
    expected = [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
    assert philox4x32(counter, key).tolist() == expected


def test_key_is_the_seed_and_counter_is_index_then_choice() -> None:
    seed = 0x299F31D0_A4093822
    drawn = uniforms(np.array([seed], np.uint64), np.array([5], np.uint32), np.array([9], np.uint32))
    word = philox4x32(np.array([[9, 5, 0, 0]], np.uint32), np.array([_PI[4:]], np.uint32))[0, 0]
    assert drawn[0] == int(word) // 2**8 / 2**24


def test_a_rows_uniform_does_not_depend_on_the_others() -> None:
    seeds = np.array([3, 2**64 - 1, 7, 3], np.uint64)
    choices, indices = np.array([0, 1, 2, 0], np.uint32), np.array([4, 5, 2**32 - 1, 4], np.uint32)
    together = uniforms(seeds, choices, indices)
    alone = [uniforms(seeds[i : i + 1], choices[i : i + 1], indices[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert together[0] == together[3]
    assert len(set(together.tolist())) == 3


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    count = 1 << 16
    drawn = uniforms(np.full(count, 42, np.uint64), np.zeros(count, np.uint32), np.arange(count, dtype=np.uint32))
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.bincount((drawn * 16).astype(int), minlength=16)
    assert np.abs(counts - count / 16).max() < 5 * np.sqrt(count / 16)

"""The x86 decoder as the runtime drives it: NumPy's logits, the same bits in any company, and wrong steps refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ostinato.engines.decoder_record import (
    ALIGNMENT,
    FILE_NAME,
    KERNEL_FILE,
    WEIGHT_FILE,
    DecoderRecord,
    read_decoder,
)
from ostinato.engines.errors import BundleError, DeviceError
from ostinato.engines.processor import why_no_kernels
from ostinato.engines.sizes import Limits
from ostinato.runtime.x86_library import X86Decoder
from tests.x86_decoder import RandomDecoder, Shape
from tests.x86_kernels import compiled_kernels

pytestmark = [
    pytest.mark.skipif(why_no_kernels() is not None, reason=f"this machine {why_no_kernels()}"),
    pytest.mark.xdist_group("x86 kernels"),  # compiled once, in one process
]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
BLOCK = 32
LIMITS = Limits(BLOCK, 9, 200, 256, 24 * BLOCK, (9,), (200,))
SHAPES = {
    "plain": Shape(),
    "one query head a kv head": Shape(num_q_heads=2, head_size=32),
    "three query heads a kv head": Shape(num_q_heads=6, head_size=48, num_kv_heads=2, hidden_size=96),
    "eight query heads a kv head": Shape(num_q_heads=8, num_kv_heads=1, head_size=64, num_layers=1),
    "big heads": Shape(num_q_heads=2, num_kv_heads=1, head_size=128, num_layers=1),
    "window": Shape(sliding_window=40),
    "biases, norms of heads, own head": Shape(has_bias=True, has_qk_norm=True, is_tied=False),
    "eight bits": Shape(bits=8, is_tied=False),
    "many groups": Shape(hidden_size=320, intermediate_size=672),
}
LENGTHS = (1, 70, 33, 5, 90)
# Steps of (row, tokens): whole prompts together; alone, one token at a time; chunks beside decoding rows.
TOGETHER = [[(1, 67), (2, 30), (3, 2), (4, 87)], *([[(1, 1), (2, 1), (3, 1), (4, 1)]] * 3)]
CHUNKS = [[(4, 40), (1, 1)], [(1, 31), (4, 9), (2, 12)], [(1, 38), (2, 21), (3, 5), (4, 8), (0, 1)], [(4, 33)]]


def _all_tokens(count: int) -> I32:
    return np.arange(count, dtype=np.int32)


class _Rank:
    """A random decoder's folder, and its rows of random tokens."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder, self.shape, self.decoder = folder, shape, RandomDecoder(shape)
        self.decoder.write(folder)
        (folder / KERNEL_FILE).symlink_to(compiled_kernels())
        rng = np.random.default_rng(1)
        self.rows = [rng.integers(0, shape.vocab_size, length).astype(np.int32) for length in LENGTHS]

    def open(self, num_threads: int = 2, limits: Limits = LIMITS) -> X86Decoder:
        return X86Decoder(self.folder, self.shape.sizes, limits, num_threads)

    def logits(
        self, steps: Sequence[Sequence[tuple[int, int]]], num_threads: int, choose: Callable[[int], I32] = _all_tokens
    ) -> dict[tuple[int, int], F32]:
        """By (row, position), of the tokens that `choose` takes of each step; each row begins with none cached."""
        decoder, found = self.open(num_threads), dict[tuple[int, int], F32]()
        done = [0] * len(self.rows)
        tables = np.random.default_rng(num_threads).permutation(np.arange(1, 24)).astype(np.int32)[:20].reshape(5, 4)
        for step in steps:
            out = np.full((200, self.shape.vocab_size), np.nan, np.float32)
            ids = np.concatenate([self.rows[row][done[row] : done[row] + count] for row, count in step])
            starts = np.cumsum([0, *(count for _, count in step)]).astype(np.int32)
            contexts = np.array([done[row] for row, _ in step], np.int32)
            indices = choose(len(ids))
            decoder.start((ids, starts, contexts, tables[[row for row, _ in step]], indices), out)
            decoder.wait()
            places = [(row, done[row] + number) for row, count in step for number in range(count)]
            found |= dict(zip([places[index] for index in indices], out, strict=False))
            for row, count in step:
                done[row] += count
        decoder.close()
        return found


@pytest.fixture
def rank(tmp_path: Path, request: pytest.FixtureRequest) -> _Rank:
    return _Rank(tmp_path, SHAPES[getattr(request, "param", "plain")])


@pytest.mark.parametrize("rank", SHAPES, indirect=True)
def test_logits_are_those_of_numpy_and_the_same_bits_in_any_company(rank: _Rank) -> None:
    together = rank.logits(TOGETHER, 2)
    wanted = [rank.decoder.logits(row) for row in rank.rows]
    errors = [np.abs(found - wanted[row][place]) for (row, place), found in together.items()]
    # A number at the border of two codes may take either: of 16 bits many do and move little, of the cache few do.
    assert np.quantile(errors, 0.2) < 1e-4
    assert np.median(errors) < 0.01
    assert np.max(errors) < 0.5
    for steps, num_threads in ((TOGETHER, 1), (TOGETHER, 3), (CHUNKS, 2), (CHUNKS, 1)):
        for place, found in rank.logits(steps, num_threads).items():
            assert place not in together or np.array_equal(found, together[place]), (place, num_threads)
    alone = rank.logits([[(1, 1)]] * 40, 2)
    assert all(np.array_equal(found, together[place]) for place, found in alone.items())


@pytest.mark.parametrize("rank", ["plain", "eight query heads a kv head", "window"], indirect=True)
def test_tokens_that_are_not_sampled_leave_their_keys_and_change_nothing(rank: _Rank) -> None:
    """Some tokens or none are, in any order and some twice: fewer than there are."""
    for steps in (TOGETHER, CHUNKS):
        whole, rng = rank.logits(steps, 2), np.random.default_rng(3)

        def some(count: int, rng: np.random.Generator = rng) -> I32:
            return rng.integers(0, count, rng.integers(0, count)).astype(np.int32)

        for num_threads in (1, 2, 3):
            found = rank.logits(steps, num_threads, some)
            assert len(found) > 20
            assert all(np.array_equal(logits, whole[place]) for place, logits in found.items())


def _arrays(*arrays: Any) -> list[I32]:
    return [np.array(array, np.int32) for array in arrays]


def _good_step() -> list[I32]:
    """Two rows, of 3 tokens and of 1 after 32."""
    return _arrays([5, 6, 7, 8], [0, 3, 4], [0, 32], [[1, 0], [2, 3]], [2, 3])


@pytest.mark.parametrize(
    ("argument", "place", "value", "told"),
    [
        (0, 1, 331, "input_ids"),
        (0, 1, -1, "input_ids"),
        (1, 0, 1, "query_starts"),
        (1, 1, 5, "query_starts"),
        (1, 1, 0, "query_starts"),
        (1, 2, 3, "query_starts"),
        (2, 1, -1, "context_lens"),
        (2, 1, 256, "context_lens"),
        (2, 1, 2**31 - 1, "context_lens"),
        (2, 1, 64, "block_tables"),
        (3, (1, 1), 25, "block_tables"),
        (3, (0, 0), -1, "block_tables"),
        (4, 1, 4, "logits_indices"),
        (4, 1, -1, "logits_indices"),
    ],
)
def test_a_number_out_of_bounds_is_refused_by_name_and_the_decoder_goes_on(
    rank: _Rank, argument: int, place: Any, value: int, told: str
) -> None:
    decoder, out = rank.open(), np.zeros((9, rank.shape.vocab_size), np.float32)
    bad = _good_step()
    bad[argument][place] = value
    with pytest.raises(DeviceError, match=told):
        decoder.start(bad, out)
    decoder.start(_good_step(), out)
    decoder.wait()
    assert np.isfinite(out[:2]).all()
    decoder.close()


def test_a_step_larger_than_the_limits_is_refused(rank: _Rank) -> None:
    decoder, out = rank.open(), np.zeros((300, rank.shape.vocab_size), np.float32)
    ids = np.zeros(201, np.int32)
    table = np.ones((1, 7), np.int32)
    with pytest.raises(DeviceError, match="num_tokens"):
        decoder.start(_arrays(ids, [0, 201], [0], table, [200]), out)
    with pytest.raises(DeviceError, match="num_rows"):
        decoder.start(_arrays(ids[:10], np.arange(11), [0] * 10, np.ones((10, 1)), np.arange(10)), out)
    decoder.close()


def test_a_decoder_that_idles_uses_no_processor_and_closes_twice(rank: _Rank) -> None:
    decoder, out = rank.open(3), np.zeros((9, rank.shape.vocab_size), np.float32)
    decoder.start(_good_step(), out)
    decoder.wait()
    time.sleep(0.05)
    begun = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - begun < 0.05
    decoder.start(_good_step(), out)
    decoder.close()  # while it runs
    decoder.close()


def test_files_that_do_not_fit_are_refused(rank: _Rank) -> None:
    with pytest.raises(DeviceError, match="layer 0"):
        X86Decoder(rank.folder, replace(rank.shape.sizes, num_kv_heads=4), LIMITS, 2)
    weights = rank.folder / WEIGHT_FILE
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(BundleError, match="build the bundle again"):
        rank.open()
    (rank.folder / "other").mkdir()
    rank.decoder.write(rank.folder / "other")
    (rank.folder / "other" / KERNEL_FILE).write_bytes(b"no library")
    with pytest.raises(BundleError, match="does not load"):
        X86Decoder(rank.folder / "other", rank.shape.sizes, LIMITS, 2)


@pytest.mark.parametrize(
    "field", ["rope_cos", "rope_sin", "final_norm", "embedding", "head", "mlp_norm", "q_norm", "down", "gate_up bias"]
)
def test_a_record_that_points_past_the_end_of_the_file_is_refused(tmp_path: Path, field: str) -> None:
    shape = SHAPES["biases, norms of heads, own head"]
    rank = _Rank(tmp_path, replace(shape, head_size=32, num_q_heads=2))  # no array is as short as an alignment
    record = read_decoder(tmp_path)
    last = record.weight_bytes - ALIGNMENT
    (tmp_path / FILE_NAME).write_text(_with_offset(record, field, last).to_json())
    with pytest.raises(BundleError, match=rf"weights\.bin has {record.weight_bytes} bytes, .* lie at {last}: build"):
        rank.open()
    (tmp_path / FILE_NAME).write_text(record.to_json())
    rank.open().close()


def _with_offset(record: DecoderRecord, field: str, offset: int) -> DecoderRecord:
    """The record, where `field` of it or of its first layer, a matrix's tiles if nothing else is named, lies there."""
    name, part = (*field.split(), "tiles")[:2]
    owner: Any = record if hasattr(record, name) else record.layers[0]
    found = getattr(owner, name)
    owner = replace(owner, **{name: offset if isinstance(found, int) else replace(found, **{part: offset})})
    return owner if isinstance(owner, DecoderRecord) else replace(record, layers=(owner, *record.layers[1:]))


def test_a_record_of_another_model_is_refused(rank: _Rank) -> None:
    with pytest.raises(BundleError, match="has 2 layers and 256 positions, wanted are 3 and 256: build the bundle"):
        X86Decoder(rank.folder, replace(rank.shape.sizes, num_layers=3), LIMITS, 1)
    with pytest.raises(BundleError, match="wanted are 2 and 288"):
        rank.open(limits=replace(LIMITS, max_context=288))


def test_a_step_that_nobody_waited_for_ends_before_the_next_begins(rank: _Rank) -> None:
    """As after Ctrl-C between the two: its arrays must live, and the threads must not see another step's."""
    decoder, ids = rank.open(), np.arange(190, dtype=np.int32)
    table = np.arange(1, 7, dtype=np.int32)[None]

    def start(first: int) -> F32:
        out = np.full((9, rank.shape.vocab_size), np.nan, np.float32)
        decoder.start((ids + first, np.array([0, 190], np.int32), np.zeros(1, np.int32), table, ids[-9:]), out)
        return out

    wanted = []
    for first in range(8):
        wanted.append(start(first))
        decoder.wait()
    found = [start(first) for first in range(8)]
    decoder.wait()
    assert np.array_equal(found, wanted)
    decoder.close()
    for use in (decoder.wait, lambda: start(0)):
        with pytest.raises(AssertionError, match="closed"):
            use()


def test_kernels_built_again_at_the_same_place_are_the_new_ones(rank: _Rank) -> None:
    folder = rank.folder / "again"
    folder.mkdir()
    rank.decoder.write(folder)
    content = compiled_kernels().read_bytes()
    handles = []
    for built in (content, content, content + b"\0"):
        (folder / KERNEL_FILE).write_bytes(built)
        decoder = X86Decoder(folder, rank.shape.sizes, LIMITS, 1)
        handles.append(decoder.library._handle)
        decoder.close()
    assert handles[0] == handles[1] != handles[2]

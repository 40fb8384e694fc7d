"""The x86 kernels one by one against NumPy: products, quantization, exponential, attention to a cache in blocks."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ostinato.builder.group_codes import StepCodes, nibbles_of, with_rows
from ostinato.engines.decoder_record import Bits
from ostinato.engines.processor import why_no_kernels
from ostinato.plugins.cache_codes import dequantize, quantize
from ostinato.plugins.x86_pack import (
    Bytes,
    Nibbles,
    alternate,
    bytes_of,
    group_of,
    matrix_bytes,
    num_groups,
    pack,
    unpack,
)
from tests.x86_decoder import multiplied, numbers_of, random_matrix
from tests.x86_kernels import compiled_kernels

pytestmark = [
    pytest.mark.skipif(why_no_kernels() is not None, reason=f"this machine {why_no_kernels()}"),
    pytest.mark.xdist_group("x86 kernels"),  # compiled once, in one process
]
F32 = NDArray[np.float32]
BLOCK = 32


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("tiles", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("bits", "rows", "columns")),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("num_kv_heads", "group", "head_size", "sliding_window")),
        ("scale", ctypes.c_float),
        ("has_amx", ctypes.c_int32),
    ]


@pytest.fixture(scope="module")
def probes() -> ctypes.CDLL:
    return ctypes.CDLL(str(compiled_kernels()))


@pytest.fixture(params=[False, True], ids=["plain", "AMX"])
def has_amx(probes: ctypes.CDLL, request: pytest.FixtureRequest) -> bool:
    if request.param and not probes.probe_amx():
        pytest.skip("this machine lacks AMX")
    return bool(request.param)


def _at(array: NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def _aligned(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    room = np.zeros(len(octets) + 64, np.uint8)
    begin = -room.ctypes.data % 64
    room[begin : begin + len(octets)] = octets
    return room[begin : begin + len(octets)]


class _Packed:
    """A matrix as the kernels have it; `gated` where its rows alternate and their product is silu(gate) * up."""

    def __init__(self, matrix: Bytes | Nibbles, bias: F32 | None = None, *, gated: bool = False) -> None:
        rows, columns = matrix.codes.shape
        self._outputs, self._is_gated = rows // 2 if gated else rows, gated
        self._tiles = _aligned(pack(matrix))
        self._bias = None if bias is None else np.pad(bias, (0, -rows % 16))
        self._matrix = _Matrix(_at(self._tiles), _at(self._bias), matrix.bits, rows, columns)

    def times(self, probes: ctypes.CDLL, x: F32, *, has_amx: bool = False) -> F32:
        out = np.full((len(x), self._outputs), np.nan, np.float32)
        probes.probe_multiply(
            ctypes.byref(self._matrix), _at(np.ascontiguousarray(x)), len(x), has_amx, self._is_gated, _at(out)
        )
        return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (16, 64), (37, 96), (331, 160), (1100, 576)])
def test_packing_loses_nothing(bits: Bits, rows: int, columns: int) -> None:
    matrix = random_matrix(np.random.default_rng(rows), rows, columns, bits)
    packed = pack(matrix)
    assert len(packed) == matrix_bytes(rows, columns, bits)
    found = unpack(packed, rows, columns, bits)
    assert type(found) is type(matrix)
    assert found.bits == bits
    for name, array in vars(matrix).items():
        assert np.array_equal(getattr(found, name), array), name
        assert getattr(found, name).dtype == array.dtype


@pytest.mark.parametrize(
    ("columns", "group"), [(32, 64), (64, 64), (96, 128), (192, 192), (576, 192), (896, 128), (1536, 256), (448, 64)]
)
def test_groups_cut_the_inputs_evenly(columns: int, group: int) -> None:
    assert group_of(columns) == group
    assert num_groups(columns) * group == -(-columns // 64) * 64


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 32), (48, 576), (37, 96), (331, 160), (1100, 64), (20, 448), (16, 1536), (4200, 32)]
)
def test_products_are_those_of_numpy_to_the_bit_in_any_company(
    probes: ctypes.CDLL, has_amx: bool, bits: int, rows: int, columns: int
) -> None:
    rng = np.random.default_rng(columns)
    matrix = random_matrix(rng, rows, columns, bits)
    x = (rng.normal(size=(290, columns)) * rng.uniform(0.01, 20, (290, 1))).astype(np.float32)
    x[3] = 0
    bias = rng.normal(size=rows).astype(np.float32)
    wanted, packed = multiplied(matrix, x) + bias, _Packed(matrix, bias)
    for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 40, 129, 290):
        for part in (slice(count), slice(290 - count, 290)):
            assert np.array_equal(packed.times(probes, x[part], has_amx=has_amx), wanted[part]), count


def test_sums_of_the_largest_numbers_are_exact(probes: ctypes.CDLL, has_amx: bool) -> None:
    x = np.ones((6, 512), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    scales = np.ones((16, 2), np.float32)
    for code in (1, 255):
        few = np.full((16, 16), 256 * code, np.uint16)
        for matrix in (
            Bytes(np.full((16, 512), code, np.uint8), scales),
            Nibbles(np.full((16, 512), 15, np.uint8), np.zeros((16, 16), np.int16), few, scales),
        ):
            wanted = multiplied(matrix, x)
            assert np.abs(wanted).max() == 127 * 512
            for count in (1, 2, 6):
                found = _Packed(matrix).times(probes, x[:count], has_amx=has_amx)
                assert np.array_equal(found, wanted[:count])


def _extremes() -> StepCodes:
    """[16, 64]: a step may be large where a minimum takes it back, and any where a single code is used."""
    rng = np.random.default_rng(9)
    codes = rng.integers(0, 16, (16, 64)).astype(np.uint8)
    codes[:, :2], codes[:, 32:34] = [0, 15], [15, 0]
    steps = np.array([1e-3, -1e-3, 1, 65504, -65504, 6e-8, 1, 1, 1, 0, 0, 65504, 1e-3, 3e37, -3e37, 1e-44], np.float32)
    minima = np.array([0, 0, -15, 0, 0, -6e-8, -7.5, 0, 65504, 0, 2, 65504, 5, 0, -1e38, 0], np.float32)
    steps, minima = (np.repeat(array[:, None], 2, axis=1) for array in (steps, minima))
    codes[6, :32], codes[6, 32:] = rng.integers(7, 9, 32), 8  # two codes beside each other; then one alone
    codes[7, :32], steps[7, 1] = 3, 1e-7
    codes[8], steps[8], minima[8] = 7, 65504, -7 * 65504  # nothing, of a large step
    steps[6, 1], minima[6, 1] = 65504, -8 * 65504 + 0.125
    return StepCodes(codes, steps, minima)


def test_nibbles_at_their_extremes_are_the_nearest_bytes(probes: ctypes.CDLL) -> None:
    made = _extremes()
    matrix = nibbles_of(made)
    whole = bytes_of(matrix)
    assert whole.codes.min() == 1
    assert whole.codes.max() == 255
    exact = np.repeat(made.steps.astype(np.float64), 32, 1) * made.codes + np.repeat(
        made.minima.astype(np.float64), 32, 1
    )
    scales = matrix.scales.astype(np.float64)
    wrong = np.abs(scales * (whole.codes.astype(np.float64) - 128) - exact)
    assert (wrong <= 0.54 / 127 * np.abs(exact).max(axis=1, keepdims=True))[:15].all()
    assert (whole.codes[[8, 9, 15]] == 128).all()
    assert (matrix.scales[[8, 9, 15]] == 0).all()  # too little for the digits of a float
    into = _aligned(np.zeros(1024, np.uint8))
    probes.probe_expand(_at(_aligned(pack(matrix))), _at(into))
    assert np.array_equal(into.reshape(16, 16, 4).transpose(1, 0, 2).reshape(16, 64), whole.codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_gated_products_are_silu_of_gate_times_up(probes: ctypes.CDLL, has_amx: bool, bits: int) -> None:
    rng = np.random.default_rng(5)
    matrix, bias = random_matrix(rng, 192, 64, bits), rng.normal(size=192).astype(np.float32)
    packed = _Packed(with_rows(matrix, alternate), alternate(bias), gated=True)
    for count in (1, 7, 50):
        x = (rng.normal(size=(count, 64)) * 3).astype(np.float32)
        gate, up = np.split(multiplied(matrix, x) + bias, 2, axis=1)
        found = packed.times(probes, x, has_amx=has_amx)
        np.testing.assert_allclose(found, gate / (1 + np.exp(-gate)) * up, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("columns", [128, 96])
def test_quantized_tokens_are_those_of_numpy_to_the_bit(probes: ctypes.CDLL, columns: int) -> None:
    rng = np.random.default_rng(6)
    x = (rng.normal(size=(21, columns)) * 10.0 ** rng.integers(-8, 8, (21, 1))).astype(np.float32)
    x[4] = 0
    found, scales = np.zeros((21, 128), np.int32), np.zeros((21, 1), np.float32)
    probes.probe_quantize(_at(x), None, 21, columns, _at(found), _at(scales))
    numbers, wanted_scales = numbers_of(x)
    assert np.array_equal(found[:, :columns], numbers)
    assert not found[:, columns:].any()
    assert np.array_equal(scales, wanted_scales)
    weight = rng.uniform(0.5, 1.5, columns).astype(np.float32)
    probes.probe_quantize(_at(x), _at(weight), 21, columns, _at(found), _at(scales))
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert (np.abs(found[:, :columns] * scales - normed) <= scales * 0.52).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_none_is_not_hidden(probes: ctypes.CDLL, has_amx: bool, bad: float, bits: int) -> None:
    packed = _Packed(random_matrix(np.random.default_rng(7), 20, 64, bits))
    for count in (2, 20):
        x = np.ones((count, 64), np.float32)
        x[1, 40] = bad
        out = packed.times(probes, x, has_amx=has_amx)
        assert np.isfinite(out[[0, *range(2, count)]]).all()
        assert not np.isfinite(out[1]).any()


def test_exponential_is_right_to_two_units(probes: ctypes.CDLL) -> None:
    x = np.linspace(-87, 88, 1 << 16, dtype=np.float32)
    out = np.empty_like(x)
    probes.probe_exponential(_at(x), _at(out), len(x))
    wanted = np.exp(x.astype(np.float64))
    assert (np.abs(out - wanted) / np.spacing(wanted.astype(np.float32))).max() < 2
    edges = np.array([0, -0.0, -200, 200, np.nan, -np.inf, np.inf] + [0] * 9, np.float32)
    probes.probe_exponential(_at(edges), _at(out), 16)
    assert np.array_equal(out[:7], np.array([1, 1, 0, np.inf, np.nan, 0, np.inf], np.float32), equal_nan=True)


@pytest.mark.parametrize("window", [0, 1, 5, 32, 40])
@pytest.mark.parametrize(("group", "size"), [(1, 16), (3, 64), (8, 48), (5, 80), (2, 128), (64, 32), (1, 256)])
def test_attention_reads_its_own_keys_and_a_query_alone_has_the_same_bits(
    probes: ctypes.CDLL, group: int, size: int, window: int
) -> None:
    rng = np.random.default_rng(size + window)
    tokens = 77
    keys, values = (rng.normal(size=(tokens, size)).astype(np.float32) for _ in range(2))
    queries = rng.normal(size=(tokens, group, size)).astype(np.float32) * 3
    table = rng.permutation(np.arange(1, 8))[: -(-tokens // BLOCK)].astype(np.int32)
    # What others left: NaN as scales, so that one number read too far shows.
    blocks = _aligned(np.full(8 * BLOCK * (2 * size + 8), 0xFF, np.uint8))
    has_amx = bool(probes.probe_amx())

    def attend(first: int, end: int, has_amx: bool = False) -> F32:
        shape = _Attention(_at(blocks), 1, group, size, window, size**-0.5, has_amx)
        out = np.full((end - first, group, size), np.nan, np.float32)
        pointers = [_at(array) for array in (keys, values, queries, table)]
        probes.probe_attend(ctypes.byref(shape), *pointers, end, first, _at(out))
        return out

    found = np.concatenate([attend(0, 40), attend(40, tokens)])
    kept = [dequantize(*quantize(array, "int8"), "int8").astype(np.float64) for array in (keys, values)]
    scores = np.einsum("qgd,kd->gqk", queries.astype(np.float64), kept[0]) * size**-0.5
    ahead = np.arange(tokens)[:, None] - np.arange(tokens)
    is_seen = (ahead >= 0) & (ahead < (window or tokens))
    shares = np.where(is_seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    wanted = np.einsum("gqk,kd->qgd", shares / shares.sum(axis=-1, keepdims=True), kept[1])
    assert np.abs(found - wanted).max() < 6e-4  # values reach 4; queries and weights have 16 bits
    for first, end in ((0, 1), (31, 32), (32, 33), (63, 64), (76, 77), (3, 77), (0, 40), (30, 47)):
        for amx in {False, has_amx}:
            assert np.array_equal(attend(first, end, amx), found[first:end]), (first, end, amx)


def test_a_token_that_is_no_number_is_hidden_from_those_before_it(probes: ctypes.CDLL, has_amx: bool) -> None:
    rng = np.random.default_rng(8)
    keys, values, queries = (rng.normal(size=(20, 32)).astype(np.float32) for _ in range(3))

    def attend() -> F32:
        blocks = _aligned(np.zeros(BLOCK * (2 * 32 + 8), np.uint8))
        shape, out = _Attention(_at(blocks), 1, 1, 32, 0, 1.0, has_amx), np.empty((20, 32), np.float32)
        table = np.zeros(1, np.int32)
        pointers = [_at(array) for array in (keys, values, queries, table)]
        probes.probe_attend(ctypes.byref(shape), *pointers, 20, 0, _at(out))
        return out

    sound = attend()
    keys[12, 3] = values[12, 5] = np.nan
    found = attend()
    assert np.array_equal(found[:12], sound[:12])
    assert np.isnan(found[12:]).all()

"""The x86 kernels one by one against NumPy: products, quantization, exponential, attention to a cache in blocks."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ostinato.engines.processor import why_no_kernels
from ostinato.plugins.cache_codes import dequantize, quantize
from ostinato.plugins.x86_pack import Groups, alternate, matrix_bytes, pack, unpack, weights
from tests.x86_decoder import alternated, quantized, random_groups
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
    ]


@pytest.fixture(scope="module")
def probes() -> ctypes.CDLL:
    return ctypes.CDLL(str(compiled_kernels()))


def _at(array: NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def _aligned(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    room = np.zeros(len(octets) + 64, np.uint8)
    begin = -room.ctypes.data % 64
    room[begin : begin + len(octets)] = octets
    return room[begin : begin + len(octets)]


def _multiply(probes: ctypes.CDLL, groups: Groups, x: F32, bias: F32 | None, *, has_amx: bool = False) -> F32:
    tiles = _aligned(pack(groups))
    rows, columns = groups.codes.shape
    padded = None if bias is None else np.pad(bias, (0, -rows % 16))
    out = np.full((len(x), rows), np.nan, np.float32)
    matrix = _Matrix(_at(tiles), _at(padded), groups.bits, rows, columns)
    probes.probe_multiply(ctypes.byref(matrix), _at(x), len(x), has_amx, _at(out), None, None)
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (16, 64), (37, 96), (331, 160), (1100, 64)])
def test_packing_loses_nothing(bits: int, rows: int, columns: int) -> None:
    groups = random_groups(np.random.default_rng(rows), rows, columns, bits)
    packed = pack(groups)
    assert len(packed) == matrix_bytes(rows, columns, bits)
    found = unpack(packed, rows, columns, bits)
    assert np.array_equal(found.codes, groups.codes)
    assert np.array_equal(found.scales, groups.scales)
    assert (found.minima is None) == (groups.minima is None)
    assert found.minima is None or np.array_equal(found.minima, groups.minima)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (48, 576), (37, 96), (331, 160), (1100, 64)])
def test_products_are_those_of_numpy_and_a_token_alone_has_the_same_bits(
    probes: ctypes.CDLL, bits: int, rows: int, columns: int
) -> None:
    rng = np.random.default_rng(columns)
    groups = random_groups(rng, rows, columns, bits)
    x = (rng.normal(size=(150, columns)) * rng.uniform(0.01, 20, (150, 1))).astype(np.float32)
    x[3, :32] = 0
    bias = rng.normal(size=rows).astype(np.float32)
    wanted = quantized(x).astype(np.float64) @ weights(groups).astype(np.float64).T + bias
    size = np.abs(quantized(x).astype(np.float64)) @ np.abs(weights(groups)).T + np.abs(bias) + 0.5
    whole = _multiply(probes, groups, x, bias)
    assert (np.abs(whole - wanted) / size).max() < 1e-5
    for count in (1, 2, 3, 5, 8, 9, 16, 17, 40, 129):
        for first in (0, 150 - count):
            part = _multiply(probes, groups, np.ascontiguousarray(x[first : first + count]), bias)
            assert np.array_equal(part, whole[first : first + count]), count


@pytest.mark.parametrize("bits", [4, 8])
def test_products_have_the_same_bits_on_amx(probes: ctypes.CDLL, bits: int) -> None:
    if not probes.probe_amx():
        pytest.skip("this machine lacks AMX")
    rng = np.random.default_rng(bits)
    groups = random_groups(rng, 100, 288, bits)
    x = rng.normal(size=(150, 288)).astype(np.float32)
    for count in (1, 9, 16, 24, 31, 150):
        plain, amx = (_multiply(probes, groups, x[:count], None, has_amx=has_amx) for has_amx in (False, True))
        assert np.array_equal(plain, amx), count


def test_gated_products_are_silu_of_gate_times_up(probes: ctypes.CDLL) -> None:
    rng = np.random.default_rng(5)
    groups, bias = random_groups(rng, 192, 64, 4), rng.normal(size=192).astype(np.float32)
    tiles, turned = _aligned(pack(alternated(groups))), alternate(bias)
    for count in (1, 7, 50):
        x = (rng.normal(size=(count, 64)) * 3).astype(np.float32)
        codes, scales = np.zeros((count, 3, 32), np.int8), np.zeros((count, 3, 1), np.float32)
        matrix = _Matrix(_at(tiles), _at(turned), 4, 192, 64)
        probes.probe_multiply(ctypes.byref(matrix), _at(x), count, 0, None, _at(codes), _at(scales))
        gate, up = np.split(quantized(x) @ weights(groups).T + bias, 2, axis=1)
        wanted = (gate / (1 + np.exp(-gate)) * up).reshape(count, 3, 32)
        assert (np.abs(codes * scales - wanted) <= scales * 0.501).all()
        assert np.abs(codes).max(axis=2).min() == 127


def test_quantized_tokens_are_those_of_numpy_to_the_bit(probes: ctypes.CDLL) -> None:
    rng = np.random.default_rng(6)
    x = (rng.normal(size=(21, 128)) * 10.0 ** rng.integers(-8, 8, (21, 1))).astype(np.float32)
    x[4] = 0
    codes, scales = np.zeros((21, 4, 32), np.int8), np.zeros((21, 4, 1), np.float32)
    probes.probe_quantize(_at(x), None, 21, 128, _at(codes), _at(scales))
    assert np.array_equal((codes * scales).reshape(21, 128), quantized(x))
    weight = rng.uniform(0.5, 1.5, 128).astype(np.float32)
    probes.probe_quantize(_at(x), _at(weight), 21, 128, _at(codes), _at(scales))
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert (np.abs(codes * scales - normed.reshape(21, 4, 32)) <= scales * 0.501).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_none_is_not_hidden(probes: ctypes.CDLL, bad: float) -> None:
    x = np.ones((2, 64), np.float32)
    x[1, 40] = bad
    out = _multiply(probes, random_groups(np.random.default_rng(7), 20, 64, 4), x, None)
    assert np.isfinite(out[0]).all()
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
    shape = _Attention(_at(blocks), 1, group, size, window, size**-0.5)

    def attend(first: int, end: int) -> F32:
        out = np.empty((end - first, group, size), np.float32)
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
    for token in (0, 31, 32, 63, 76):
        assert np.array_equal(attend(token, token + 1)[0], found[token])
    assert np.array_equal(attend(3, tokens), found[3:])


def test_a_token_that_is_no_number_is_hidden_from_those_before_it(probes: ctypes.CDLL) -> None:
    rng = np.random.default_rng(8)
    keys, values, queries = (rng.normal(size=(20, 32)).astype(np.float32) for _ in range(3))

    def attend() -> F32:
        blocks = _aligned(np.zeros(BLOCK * (2 * 32 + 8), np.uint8))
        shape, out = _Attention(_at(blocks), 1, 1, 32, 0, 1.0), np.empty((20, 32), np.float32)
        table = np.zeros(1, np.int32)
        pointers = [_at(array) for array in (keys, values, queries, table)]
        probes.probe_attend(ctypes.byref(shape), *pointers, 20, 0, _at(out))
        return out

    sound = attend()
    keys[12, 3] = values[12, 5] = np.nan
    found = attend()
    assert np.array_equal(found[:12], sound[:12])
    assert np.isnan(found[12:]).all()

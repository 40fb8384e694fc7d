"""Weights in the order in which the x86 kernels read them, and back (offline, and in tests).

    a matrix [N, K]  ─▶  tiles of 16 outputs, one after another; in a tile: blocks, then scales (`x86/ostinato_x86.h`)

A block has 64 inputs of 16 outputs: it is what AMX takes at once, and 64 bytes of it, four inputs of each output, are
what one VNNI instruction takes. What is multiplied is always bytes; nibbles are how some of them are kept in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.decoder_record import Bits

U8 = NDArray[np.uint8]
I16 = NDArray[np.int16]
U16 = NDArray[np.uint16]
F32 = NDArray[np.float32]

TILE = 16  # outputs of a tile
BLOCK = 64  # inputs of a block; K is filled up to whole ones
SHARE = 32  # inputs whose nibbles share a factor and an offset
MAX_GROUP = 256  # inputs that share a scale at most: their sum of products fits 32 bits
ZERO_CODE = 128  # a byte is the signed number plus this
_NO_OFFSET = ZERO_CODE << 8
_NIBBLE_BLOCK = BLOCK * TILE // 2 + 2 * 2 * TILE * 2  # bytes: codes, then factors and offsets of two shares


@dataclass(frozen=True)
class Bytes:
    """A matrix of 8-bit codes: weight[n, k] = scales[n, k // group_of(K)] * (codes[n, k] - 128)."""

    codes: U8  # [N, K]
    scales: F32  # [N, groups]

    @property
    def bits(self) -> Bits:
        return 8


@dataclass(frozen=True)
class Nibbles:
    """A matrix of 4-bit codes, which `bytes_of` makes bytes of as the kernels do.

    code of 8 bits[n, k] = (codes[n, k] * factors[n, k // 32] + offsets[n, k // 32]) >> 8, in 16 bits without sign: so a
    factor or an offset beyond 16 bits may be kept without what is beyond them.
    """

    codes: U8  # [N, K], below 16
    factors: I16  # [N, K/32]
    offsets: U16  # [N, K/32]
    scales: F32  # [N, groups]

    @property
    def bits(self) -> Bits:
        return 4


def bytes_of(matrix: Nibbles) -> Bytes:
    """What the kernels multiply in their place."""
    factors = np.repeat(matrix.factors.view(np.uint16), SHARE, axis=1)
    products = matrix.codes * factors + np.repeat(matrix.offsets, SHARE, axis=1)
    return Bytes((products >> 8).astype(np.uint8), matrix.scales)


def weights(matrix: Bytes | Nibbles) -> F32:
    """What the kernels compute with, [N, K] float32."""
    whole = bytes_of(matrix) if isinstance(matrix, Nibbles) else matrix
    columns = whole.codes.shape[1]
    scales = np.repeat(whole.scales, group_of(columns), axis=1)[:, :columns]
    product: F32 = scales * (whole.codes.astype(np.float32) - np.float32(ZERO_CODE))
    return product


def blocks_of(columns: int) -> int:
    """How many blocks K inputs fill."""
    return -(-columns // BLOCK)


def group_of(columns: int) -> int:
    """How many of K inputs share a scale: 64, 128, 192 or 256, the most that cut the blocks evenly."""
    return BLOCK * max(span for span in range(1, MAX_GROUP // BLOCK + 1) if blocks_of(columns) % span == 0)


def num_groups(columns: int) -> int:
    """How many scales an output with K inputs has."""
    return blocks_of(columns) * BLOCK // group_of(columns)


def tile_bytes(columns: int, bits: Bits) -> int:
    """How far one tile of a matrix with K columns is from the next."""
    return blocks_of(columns) * _block_bytes(bits) + num_groups(columns) * TILE * 4


def matrix_bytes(rows: int, columns: int, bits: Bits) -> int:
    """What a matrix [rows, columns] takes in the file."""
    return -(-rows // TILE) * tile_bytes(columns, bits)


def pack(matrix: Bytes | Nibbles) -> U8:
    """The bytes of a matrix, [matrix_bytes]; rows and columns are filled up with zeros. K % 32 == 0."""
    rows, columns = matrix.codes.shape
    tiles = -(-rows // TILE)
    scales = np.zeros((tiles * TILE, num_groups(columns)), np.float32)
    scales[:rows] = matrix.scales
    sides = np.ascontiguousarray(scales.reshape(tiles, TILE, -1).transpose(0, 2, 1))
    blocks = _nibble_blocks(matrix) if isinstance(matrix, Nibbles) else _in_blocks(matrix.codes, ZERO_CODE)
    parts = [blocks.reshape(tiles, -1), sides.view(np.uint8).reshape(tiles, -1)]
    packed: U8 = np.concatenate(parts, axis=1).reshape(-1)
    return packed


def unpack(packed: U8, rows: int, columns: int, bits: Bits) -> Bytes | Nibbles:
    """The matrix that `pack` made these bytes of."""
    tiles, blocks = -(-rows // TILE), blocks_of(columns)
    lines = packed.reshape(tiles, -1)
    size = blocks * _block_bytes(bits)
    sides = np.ascontiguousarray(lines[:, size:]).view(np.float32).reshape(tiles, -1, TILE)
    scales = np.ascontiguousarray(_by_row(sides.transpose(0, 2, 1))[:rows])
    codes = lines[:, :size].reshape(tiles, blocks, -1)
    if bits == 8:
        return Bytes(_out_of_blocks(codes, rows, columns), scales)
    nibbles = codes[..., : BLOCK * TILE // 2]
    both = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    steps = np.ascontiguousarray(codes[..., BLOCK * TILE // 2 :]).view(np.uint16)
    places = steps.reshape(tiles, blocks, 2, 2, TILE).transpose(3, 0, 4, 1, 2)  # [factor or offset, tile, o, b, share]
    factors, offsets = (np.ascontiguousarray(_by_row(one)[:rows, : columns // SHARE]) for one in places)
    return Nibbles(_out_of_blocks(both, rows, columns), factors.view(np.int16), offsets, scales)


def alternate(gate_up: NDArray[Any]) -> NDArray[Any]:
    """Rows [gate; up] [2I, ...] in the order of gate_up's tiles: 16 of gate, 16 of up, and so on. I % 16 == 0."""
    half = len(gate_up) // 2
    rows = np.arange(2 * half).reshape(2, half // TILE, TILE).transpose(1, 0, 2).reshape(-1)
    alternated: NDArray[Any] = gate_up[rows]
    return alternated


def _block_bytes(bits: Bits) -> int:
    return BLOCK * TILE if bits == 8 else _NIBBLE_BLOCK


def _nibble_blocks(matrix: Nibbles) -> U8:
    """[tile, block, bytes]: low nibbles are of the first 32 inputs, high ones of the others."""
    low, high = np.split(_in_blocks(matrix.codes, 0), 2, axis=2)
    blocks = low.shape[1]
    factors = _filled(matrix.factors.view(np.uint16), 2 * blocks, 0)
    offsets = _filled(matrix.offsets, 2 * blocks, _NO_OFFSET)
    both = np.stack([factors, offsets]).reshape(2, -1, TILE, blocks, 2)
    steps = np.ascontiguousarray(both.transpose(1, 3, 4, 0, 2))  # [tile, b, share, factor or offset, o]
    octets = steps.reshape(-1, blocks, 4 * TILE).view(np.uint8)
    joined: U8 = np.concatenate([(low | high << 4).reshape(len(low), blocks, -1), octets], axis=2)
    return joined


def _in_blocks(codes: U8, zero: int) -> U8:
    """Codes [N, K] as [tile, block, j, output, four]."""
    blocks = blocks_of(codes.shape[1])
    return _filled(codes, blocks * BLOCK, zero).reshape(-1, TILE, blocks, 16, 4).transpose(0, 2, 3, 1, 4)


def _out_of_blocks(codes: U8, rows: int, columns: int) -> U8:
    """[N, K] of [tile, block, 1024]."""
    tiles, blocks, _ = codes.shape
    lines = _by_row(codes.reshape(tiles, blocks, 16, TILE, 4).transpose(0, 3, 1, 2, 4))
    return np.ascontiguousarray(lines[:rows, :columns])


def _by_row(array: NDArray[Any]) -> NDArray[Any]:
    """[tile, output, ...] as [row, ...], which has one axis."""
    return array.reshape(len(array) * TILE, -1)


def _filled(array: NDArray[Any], width: int, value: int) -> NDArray[Any]:
    """Rows up to whole tiles, and columns up to `width`, of `value`."""
    filled = np.full((-(-len(array) // TILE) * TILE, width), value, array.dtype)
    filled[: len(array), : array.shape[1]] = array
    return filled

"""Weights in the order in which the x86 kernels read them, and back (offline, and in tests).

    a matrix [N, K]  ─▶  tiles of 16 outputs, one after another; in a tile: codes, scales, minima (`x86/ostinato_x86.h`)

A tile's codes are stored so that 64 bytes are four inputs of each of 16 outputs: what one VNNI instruction takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.decoder_record import ALIGNMENT, GROUP

U8 = NDArray[np.uint8]
F16 = NDArray[np.float16]
F32 = NDArray[np.float32]

TILE = 16  # outputs of a tile
ZERO_CODE = 128  # of 8 bits: a code is the signed number plus this


@dataclass(frozen=True)
class Groups:
    """A quantized matrix: weight[n, k] = scales[n, k // 32] * codes[n, k] + minima[n, k // 32].

    8 bits have no minima: theirs are -128 * scales, so that a code is a signed number plus 128.
    """

    codes: U8  # [N, K]; below 16 where there are minima
    scales: F16  # [N, K/32]
    minima: F16 | None  # [N, K/32]

    @property
    def bits(self) -> int:
        return 8 if self.minima is None else 4


def tile_bytes(columns: int, bits: int) -> int:
    """How far one tile of a matrix with K columns is from the next."""
    groups = columns // GROUP
    size = groups * (GROUP * TILE + 2 * TILE if bits == 8 else GROUP * TILE // 2 + 4 * TILE)
    return -(-size // ALIGNMENT) * ALIGNMENT


def matrix_bytes(rows: int, columns: int, bits: int) -> int:
    """What a matrix [rows, columns] takes in the file."""
    return -(-rows // TILE) * tile_bytes(columns, bits)


def pack(matrix: Groups) -> U8:
    """The bytes of a matrix, [matrix_bytes]; rows are filled up to whole tiles with zeros. K % 32 == 0."""
    rows, columns = matrix.codes.shape
    tiles, groups = -(-rows // TILE), columns // GROUP
    codes = _filled(matrix.codes).reshape(tiles, TILE, groups, 8, 4).transpose(0, 2, 3, 1, 4)  # [tile, g, j, o, i]
    if matrix.minima is None:
        parts = [codes, _side(matrix.scales)]
    else:
        parts = [codes[:, :, :4] | codes[:, :, 4:] << 4, _side(matrix.scales), _side(matrix.minima)]
    packed = np.zeros((tiles, tile_bytes(columns, matrix.bits)), np.uint8)
    begin = 0
    for part in parts:
        octets = np.ascontiguousarray(part).view(np.uint8).reshape(tiles, -1)
        packed[:, begin : begin + octets.shape[1]] = octets
        begin += octets.shape[1]
    return packed.reshape(-1)


def unpack(packed: U8, rows: int, columns: int, bits: int) -> Groups:
    """The matrix that `pack` made these bytes of."""
    tiles, groups = -(-rows // TILE), columns // GROUP
    lines = packed.reshape(tiles, -1)
    size = groups * GROUP * TILE * bits // 8
    codes = lines[:, :size].reshape(tiles, groups, bits, TILE, 4)
    if bits == 4:
        codes = np.concatenate([codes & 15, codes >> 4], axis=2)
    whole = np.ascontiguousarray(codes.transpose(0, 3, 1, 2, 4)).reshape(-1, columns)[:rows]
    sides = [
        np.ascontiguousarray(lines[:, begin : begin + groups * TILE * 2]).view(np.float16)
        for begin in ([size] if bits == 8 else [size, size + groups * TILE * 2])
    ]
    plain = [side.reshape(tiles, groups, TILE).transpose(0, 2, 1).reshape(-1, groups)[:rows] for side in sides]
    return Groups(whole, plain[0], plain[1] if bits == 4 else None)


def weights(matrix: Groups) -> F32:
    """What the kernels compute with, [N, K] float32."""
    scales = np.repeat(matrix.scales.astype(np.float32), GROUP, axis=1)
    if matrix.minima is None:
        return scales * (matrix.codes.astype(np.float32) - np.float32(ZERO_CODE))
    return scales * matrix.codes.astype(np.float32) + np.repeat(matrix.minima.astype(np.float32), GROUP, axis=1)


def alternate(gate_up: NDArray[Any]) -> NDArray[Any]:
    """Rows [gate; up] [2I, ...] in the order of gate_up's tiles: 16 of gate, 16 of up, and so on. I % 16 == 0."""
    half = len(gate_up) // 2
    rows = np.arange(2 * half).reshape(2, half // TILE, TILE).transpose(1, 0, 2).reshape(-1)
    alternated: NDArray[Any] = gate_up[rows]
    return alternated


def _filled(array: NDArray[Any]) -> NDArray[Any]:
    """Zero rows up to whole tiles."""
    missing = -len(array) % TILE
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)]) if missing else array


def _side(side: F16) -> NDArray[Any]:
    """Scales or minima [N, K/32] as [tile, group, 16]."""
    filled = _filled(side)
    return filled.reshape(-1, TILE, side.shape[1]).transpose(0, 2, 1)

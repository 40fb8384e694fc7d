"""decoder.json of an `x86` bundle: where each array of a decoder lies in weights.bin (written offline, read at start).

Sizes of the model are in the manifest. Every offset is in bytes from the start of weights.bin and a multiple of
ALIGNMENT. How codes lie in a matrix is `plugins/x86_pack.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from .errors import BundleError
from .json_record import bounded_text, json_table, record_from

FILE_NAME, WEIGHT_FILE, KERNEL_FILE = "decoder.json", "weights.bin", "kernels.so"
DECODER_FILES = (FILE_NAME, WEIGHT_FILE, KERNEL_FILE)  # of rank 0
ALIGNMENT = 64  # bytes: a cache line, and the widest vector load
WIDTH_STEP = 32  # inputs of a matrix are a multiple of this: two vectors of floats, a published block
BLOCK_SIZE = 32  # tokens of a KV block, which the kernels take at once
LAYOUT_VERSION = 2  # of weights.bin and of the kernels that read it: OSTINATO_X86_VERSION of their header
Bits = Literal[4, 8]


@dataclass(frozen=True)
class Matrix:
    """One weight [rows, columns] as codes with scales, tile by tile from offset `tiles` on.

    `rows`: outputs as the model has them, without what fills up the last tile. `bias`: offset of float32, as many as
    the tiles have outputs, or None.
    """

    bits: Bits
    rows: int
    columns: int
    tiles: int
    bias: int | None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < WIDTH_STEP or self.columns % WIDTH_STEP:
            raise BundleError(
                f"a matrix is {self.rows} x {self.columns}, wanted are rows, and a multiple of {WIDTH_STEP} as columns"
            )

    def offsets(self) -> Iterator[int]:
        yield from (offset for offset in (self.tiles, self.bias) if offset is not None)


@dataclass(frozen=True)
class DecoderLayer:
    """Offsets of one layer's norms (float32 [hidden], q and k's [head_size]), and its four matrices."""

    attention_norm: int
    mlp_norm: int
    q_norm: int | None
    k_norm: int | None
    qkv: Matrix
    attention_out: Matrix
    gate_up: Matrix  # tiles of gate and up in turns
    down: Matrix

    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.attention_out, self.gate_up, self.down

    def offsets(self) -> Iterator[int]:
        norms = (self.attention_norm, self.mlp_norm, self.q_norm, self.k_norm)
        yield from (offset for offset in norms if offset is not None)
        for matrix in self.matrices():
            yield from matrix.offsets()


@dataclass(frozen=True)
class DecoderRecord:
    """Everything that the kernels must know besides sizes and limits.

    `rope_rows`: positions that the two tables hold; `rope_cos` and `rope_sin`: offsets of float32
    [rope_rows, head_size / 2]. `head`: None where the embedding is the head too. `weight_bytes`: of weights.bin.
    """

    layout_version: int
    rms_eps: float
    rope_rows: int
    rope_cos: int
    rope_sin: int
    embedding: Matrix
    layers: tuple[DecoderLayer, ...]
    final_norm: int
    head: Matrix | None
    weight_bytes: int

    def __post_init__(self) -> None:
        odd = [offset for offset in self.offsets() if offset % ALIGNMENT or not 0 <= offset < self.weight_bytes]
        if odd:
            raise BundleError(
                f"offset {odd[0]} is no multiple of {ALIGNMENT} below the {self.weight_bytes} bytes of {WEIGHT_FILE}"
            )

    def matrices(self) -> Iterator[Matrix]:
        yield self.embedding
        for layer in self.layers:
            yield from layer.matrices()
        if self.head is not None:
            yield self.head

    def offsets(self) -> Iterator[int]:
        yield from (self.rope_cos, self.rope_sin, self.final_norm)
        for layer in self.layers:
            yield from layer.offsets()
        for matrix in (self.embedding, self.head):
            if matrix is not None:
                yield from matrix.offsets()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def read_decoder(rank_dir: Path) -> DecoderRecord:
    """The record in a rank's folder. Raises BundleError if it does not read as one, or is of another layout."""
    path = rank_dir / FILE_NAME
    table = json_table(bounded_text(path), path)
    if (found := table.get("layout_version")) != LAYOUT_VERSION:
        raise BundleError(
            f"{path} is of weight layout {found!s:.20}, this ostinato reads {LAYOUT_VERSION}: build the bundle "
            "again, or open it with the ostinato that built it"
        )
    return record_from(DecoderRecord, table, path)

"""The `x86` target: compiled kernels, packed weights and the record of where each lies (offline).

    checkpoint ─▶ codes as published, or made ─▶ tiles ─▶ weights.bin, decoder.json
    plugins/x86/*.c ─▶ kernels.so

Nothing is traced: the kernels are the decoder. Weights are read, packed and written one at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ostinato.engines.decoder_record import (
    FILE_NAME,
    LAYOUT_VERSION,
    WEIGHT_FILE,
    WIDTH_STEP,
    DecoderLayer,
    DecoderRecord,
    Matrix,
)
from ostinato.engines.errors import BuildError
from ostinato.engines.processor import KERNEL_NEEDS
from ostinato.engines.recipe import Recipe
from ostinato.engines.sizes import ModelSizes
from ostinato.plugins.x86_pack import TILE, alternate, matrix_bytes, pack

from .c_compiler import compile_kernels
from .checkpoint import F32, Checkpoint
from .group_codes import with_rows
from .rank_result import RankResult
from .shard import weight_slices
from .weight_codes import WeightCodes
from .weight_file import WeightFile
from .weights import parameters_of

if TYPE_CHECKING:
    from .pipeline import Progress

MAX_HEAD_SIZE = 256
_HEAD_STEP = 16  # float32 lanes of a register


def write_rank(recipe: Recipe, checkpoint: Checkpoint, folder: Path, progress: Progress) -> RankResult:
    """Every file of the one rank. Raises BuildError where the kernels don't know the model, or don't compile."""
    check_model(checkpoint.config.sizes)
    progress.stage("kernels")
    compile_kernels(folder)
    codes = WeightCodes(checkpoint, recipe.weights)
    progress.stage("weights", _packed_bytes(checkpoint, codes, recipe.limits.max_context))
    with WeightFile(folder / WEIGHT_FILE, progress.advance) as file:
        record = _Packer(checkpoint, codes, file, recipe.limits.max_context).decoder()
    (folder / FILE_NAME).write_text(record.to_json())
    return RankResult(weight_bytes=record.weight_bytes, notes=codes.notes(), toolchain={}, hardware=dict(KERNEL_NEEDS))


def check_model(sizes: ModelSizes) -> None:
    """Raises BuildError for sizes that the kernels' tiles and registers don't divide."""
    widths = {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_q_heads * head_size": sizes.num_q_heads * sizes.head_size,
    }
    for name, width in widths.items():
        if width % WIDTH_STEP:
            raise BuildError(
                f"the model's {name} is {width}, target x86 needs a multiple of {WIDTH_STEP}: choose target cpu"
            )
    if sizes.head_size % _HEAD_STEP or sizes.head_size > MAX_HEAD_SIZE:
        raise BuildError(
            f"the model's heads have size {sizes.head_size}, target x86 needs a multiple of {_HEAD_STEP} up to "
            f"{MAX_HEAD_SIZE}: choose target cpu"
        )


def _packed_bytes(checkpoint: Checkpoint, codes: WeightCodes, rope_rows: int) -> int:
    """Bytes that will be written, up to padding."""
    total = rope_rows * checkpoint.config.sizes.head_size * 4
    for name, wanted in weight_slices(checkpoint.config).items():
        rows, *columns = wanted.shape
        total += matrix_bytes(rows, columns[0], codes.bits(name)) if columns else rows * 4
    return total


class _Packer:
    """Packs the parameters of one decoder into a file, in the order in which a step reads them."""

    def __init__(self, checkpoint: Checkpoint, codes: WeightCodes, file: WeightFile, rope_rows: int) -> None:
        self._config = checkpoint.config
        self._parameters = parameters_of(checkpoint, rope_rows)
        self._codes, self._file, self._rope_rows = codes, file, rope_rows

    def decoder(self) -> DecoderRecord:
        half = self._config.sizes.head_size // 2
        cos, sin = (self._file.put(self._parameters[name]()[:, :half]) for name in ("rope_cos", "rope_sin"))
        embedding = self._matrix("embedding")
        layers = tuple(self._layer(number) for number in range(self._config.sizes.num_layers))
        final_norm = self._vector("final_norm")
        head = None if self._config.tied else self._matrix("head")
        return DecoderRecord(
            layout_version=LAYOUT_VERSION,
            rms_eps=self._config.rms_eps,
            rope_rows=self._rope_rows,
            rope_cos=cos,
            rope_sin=sin,
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            head=head,
            weight_bytes=self._file.size_bytes,
        )

    def _layer(self, number: int) -> DecoderLayer:
        prefix = f"layers.{number}"
        return DecoderLayer(
            attention_norm=self._vector(f"{prefix}.attention_norm"),
            mlp_norm=self._vector(f"{prefix}.mlp_norm"),
            q_norm=self._vector(f"{prefix}.q_norm") if self._config.qk_norm else None,
            k_norm=self._vector(f"{prefix}.k_norm") if self._config.qk_norm else None,
            qkv=self._matrix(f"{prefix}.qkv"),
            attention_out=self._matrix(f"{prefix}.attention_out"),
            gate_up=self._matrix(f"{prefix}.gate_up"),
            down=self._matrix(f"{prefix}.down"),
        )

    def _matrix(self, name: str) -> Matrix:
        codes = self._codes.read(f"{name}.weight")
        bias = self._parameters.get(f"{name}.bias")
        values = None if bias is None else bias()
        if name.endswith(".gate_up"):
            codes = with_rows(codes, alternate)
            values = None if values is None else np.asarray(alternate(values), np.float32)
        return Matrix(
            bits=codes.bits,
            rows=codes.codes.shape[0],
            columns=codes.codes.shape[1],
            tiles=self._file.put(pack(codes)),
            bias=None if values is None else self._file.put(_filled(values)),
        )

    def _vector(self, name: str) -> int:
        """The offset of a norm."""
        return self._file.put(self._parameters[f"{name}.weight"]())


def _filled(bias: F32) -> F32:
    """Zeros up to a whole tile."""
    return np.pad(bias, (0, -len(bias) % TILE))

"""A bundle's compiled decoder, called through ctypes: `plugins/x86/ostinato_x86.h` in Python (made at start).

The structs are those of the header, field by field; `ostinato_version` tells whether a library was built of it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.decoder_record import (
    KERNEL_FILE,
    LAYOUT_VERSION,
    WEIGHT_FILE,
    DecoderLayer,
    DecoderRecord,
    Matrix,
    read_decoder,
)
from ostinato.engines.errors import BundleError, DeviceError
from ostinato.engines.sizes import Limits, ModelSizes
from ostinato.plugins.sampling_rows import F32, I32
from ostinato.plugins.x86_pack import TILE, matrix_bytes

_ERROR_SIZE = 256
_FLOAT_BYTES = 4
_INT32, _POINTER = ctypes.c_int32, ctypes.c_void_p

_Number = type[ctypes.c_int32] | type[ctypes.c_void_p]


def _fields(kind: _Number, *names: str) -> list[tuple[str, _Number]]:
    return [(name, kind) for name in names]


class _Matrix(ctypes.Structure):
    _fields_ = [*_fields(_POINTER, "tiles", "bias"), *_fields(_INT32, "bits", "rows", "columns")]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Matrix) for name in ("qkv", "attention_out", "gate_up", "down")),
        *_fields(_POINTER, "attention_norm", "mlp_norm", "q_norm", "k_norm"),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *_fields(_INT32, "vocab_size", "hidden_size", "intermediate_size", "num_layers"),
        *_fields(_INT32, "num_q_heads", "num_kv_heads", "head_size", "sliding_window", "rope_rows"),
        ("eps", ctypes.c_float),
        *_fields(_POINTER, "rope_cos", "rope_sin", "final_norm"),
        ("embedding", _Matrix),
        ("head", _Matrix),
        ("layers", ctypes.POINTER(_Layer)),
    ]


class _Limits(ctypes.Structure):
    _fields_ = _fields(_INT32, "max_rows", "max_step_tokens", "num_blocks", "num_threads")


class _Step(ctypes.Structure):
    _fields_ = [
        *_fields(_INT32, "num_tokens", "num_rows", "num_sampled", "table_width"),
        *_fields(_POINTER, "input_ids", "query_starts", "context_lens", "block_tables", "logits_indices", "logits"),
    ]


class X86Decoder:
    """One decoder, its threads and its KV cache. One step at a time: `start`, then `wait`.

    Weights are mapped from the file, not copied. Raises BundleError where files do not fit each other or the model,
    DeviceError where the kernels don't open it.
    """

    def __init__(self, rank_dir: Path, sizes: ModelSizes, limits: Limits, num_threads: int) -> None:
        record = read_decoder(rank_dir)
        _check_record(record, sizes, limits, rank_dir)
        self._library = _load(rank_dir / KERNEL_FILE)
        self._error = ctypes.create_string_buffer(_ERROR_SIZE)
        self._weights = _Weights(rank_dir / WEIGHT_FILE, record)
        model = _model(record, sizes, self._weights)
        counts = _Limits(limits.max_rows, limits.max_step_tokens, limits.num_blocks, num_threads)
        self._handle: int | None = self._library.ostinato_open(
            ctypes.byref(model), ctypes.byref(counts), self._error, _ERROR_SIZE
        )
        if not self._handle:
            raise DeviceError(
                f"the kernels in {rank_dir} did not open the model: {self._told()}; give fewer threads or a smaller "
                "kv_tokens where those are short, else build it again"
            )
        self._held: Sequence[NDArray[np.generic]] = ()

    def start(self, arrays: Sequence[I32], logits: F32) -> None:
        """Begin a step on the decoder's own threads.

        `arrays`: input_ids [T], query_starts [B+1], context_lens [B], block_tables [B, P], logits_indices [S], int32;
        they may be changed only after `wait`. `logits`: [S, V] float32, written. Raises DeviceError where a number is
        out of bounds; then nothing runs.
        """
        assert self._handle, "the decoder is closed"
        if self._held:  # its caller was interrupted, and nobody waited for that step
            self.wait()
        held = [np.ascontiguousarray(array, np.int32) for array in arrays]
        ids, starts, contexts, tables, sampled = held
        assert len(starts) - 1 == len(contexts) == len(tables)
        assert logits.flags.c_contiguous
        assert len(logits) >= len(sampled)
        self._held = (*held, logits)
        step = _Step(
            len(ids), len(contexts), len(sampled), tables.shape[1], *[array.ctypes.data for array in self._held]
        )
        if self._library.ostinato_start(self._handle, ctypes.byref(step), self._error, _ERROR_SIZE):
            self._held = ()
            shape = f"{len(ids)} tokens in {len(contexts)} rows"
            raise DeviceError(f"the kernels refused a step of {shape}: {self._told()}")

    def wait(self) -> None:
        """Block until the step is done; other Python threads run meanwhile."""
        assert self._handle, "the decoder is closed"
        self._library.ostinato_wait(self._handle)
        self._held = ()

    def close(self) -> None:
        """Wait for a running step, end the threads, give the cache back. May be called again."""
        handle, self._handle = self._handle, None
        if handle:
            self._library.ostinato_close(handle)

    @property
    def library(self) -> ctypes.CDLL:
        """The bundle's kernels: they also sample."""
        return self._library

    def _told(self) -> str:
        return self._error.value.decode(errors="replace")


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = _loaded(path.read_bytes())
        found = library.ostinato_version()
    except (OSError, AttributeError) as error:
        raise BundleError(f"{path} does not load as compiled kernels: {error}; build the bundle again") from None
    if found != LAYOUT_VERSION:
        raise BundleError(
            f"{path} reads weights of layout {found}, this ostinato's are of {LAYOUT_VERSION}: build the bundle again"
        )
    library.ostinato_open.restype = _POINTER
    library.ostinato_open.argtypes = [_POINTER, _POINTER, _POINTER, ctypes.c_size_t]
    library.ostinato_start.argtypes = [_POINTER, _POINTER, _POINTER, ctypes.c_size_t]
    for name in ("ostinato_wait", "ostinato_close"):
        function = getattr(library, name)
        function.restype, function.argtypes = None, [_POINTER]
    return library


@cache
def _loaded(content: bytes) -> ctypes.CDLL:
    """The library of these bytes. The loader knows libraries by name, and would give a bundle that was built again at
    the same place the kernels of the one before: so each content gets a name of its own, which lives with the process.
    """
    file = os.memfd_create("ostinato-kernels")
    with os.fdopen(os.dup(file), "wb") as writer:
        writer.write(content)
    return ctypes.CDLL(f"/proc/self/fd/{file}")


class _Weights:
    """The mapped weight file. What lies in it has an address; what would reach past its end is refused."""

    def __init__(self, path: Path, record: DecoderRecord) -> None:
        found = path.stat().st_size
        if found != record.weight_bytes:
            raise BundleError(
                f"{path} has {found} bytes, its record says {record.weight_bytes}: build the bundle again"
            )
        self._path = path
        self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")

    def at(self, offset: int, size: int) -> int:
        """The address of `size` bytes from `offset` on."""
        if offset + size > len(self._bytes):
            raise BundleError(
                f"{self._path} has {len(self._bytes)} bytes, its record says that {size} lie at {offset}: build the "
                "bundle again"
            )
        return int(self._bytes.ctypes.data) + offset

    def floats(self, offset: int, count: int) -> int:
        """The address of `count` float32."""
        return self.at(offset, count * _FLOAT_BYTES)

    def floats_if(self, offset: int | None, count: int) -> int | None:
        return None if offset is None else self.floats(offset, count)


def _check_record(record: DecoderRecord, sizes: ModelSizes, limits: Limits, rank_dir: Path) -> None:
    """Raises BundleError for another number of layers than the model's, or too few positions."""
    if len(record.layers) != sizes.num_layers or record.rope_rows < limits.max_context:
        raise BundleError(
            f"the record in {rank_dir} has {len(record.layers)} layers and {record.rope_rows} positions, wanted are "
            f"{sizes.num_layers} and {limits.max_context}: build the bundle again"
        )


def _model(record: DecoderRecord, sizes: ModelSizes, weights: _Weights) -> _Model:
    layers = (_Layer * len(record.layers))(*(_layer(layer, sizes, weights) for layer in record.layers))
    num_angles = record.rope_rows * sizes.head_size // 2
    return _Model(
        sizes.vocab_size,
        sizes.hidden_size,
        sizes.intermediate_size,
        len(record.layers),
        sizes.num_q_heads,
        sizes.num_kv_heads,
        sizes.head_size,
        sizes.sliding_window,
        record.rope_rows,
        record.rms_eps,
        weights.floats(record.rope_cos, num_angles),
        weights.floats(record.rope_sin, num_angles),
        weights.floats(record.final_norm, sizes.hidden_size),
        _matrix(record.embedding, weights),
        _matrix(record.head or record.embedding, weights),
        layers,
    )


def _layer(layer: DecoderLayer, sizes: ModelSizes, weights: _Weights) -> _Layer:
    return _Layer(
        *(_matrix(matrix, weights) for matrix in layer.matrices()),
        weights.floats(layer.attention_norm, sizes.hidden_size),
        weights.floats(layer.mlp_norm, sizes.hidden_size),
        weights.floats_if(layer.q_norm, sizes.head_size),
        weights.floats_if(layer.k_norm, sizes.head_size),
    )


def _matrix(matrix: Matrix, weights: _Weights) -> _Matrix:
    tiles = weights.at(matrix.tiles, matrix_bytes(matrix.rows, matrix.columns, matrix.bits))
    bias = weights.floats_if(matrix.bias, -(-matrix.rows // TILE) * TILE)
    return _Matrix(tiles, bias, matrix.bits, matrix.rows, matrix.columns)

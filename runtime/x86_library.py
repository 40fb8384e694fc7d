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

_ERROR_SIZE = 256
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

    `weights`: bytes of the weight file; they are not copied.
    """

    def __init__(self, rank_dir: Path, sizes: ModelSizes, limits: Limits, num_threads: int) -> None:
        record = read_decoder(rank_dir)
        self._library = _load(rank_dir / KERNEL_FILE)
        self._error = ctypes.create_string_buffer(_ERROR_SIZE)
        self._weights = _map_weights(rank_dir / WEIGHT_FILE, record)
        model = _model(record, sizes, self._weights.ctypes.data)
        counts = _Limits(limits.max_rows, limits.max_step_tokens, limits.num_blocks, num_threads)
        self._handle: int | None = self._library.ostinato_open(
            ctypes.byref(model), ctypes.byref(counts), self._error, _ERROR_SIZE
        )
        if not self._handle:
            raise DeviceError(f"the kernels in {rank_dir} did not open the model: {self._told()}; build it again")
        self._held: Sequence[NDArray[np.generic]] = ()

    def start(self, arrays: Sequence[I32], logits: F32) -> None:
        """Begin a step on the decoder's own threads.

        `arrays`: input_ids [T], query_starts [B+1], context_lens [B], block_tables [B, P], logits_indices [S], int32;
        they may be changed only after `wait`. `logits`: [S, V] float32, written. Raises DeviceError where a number is
        out of bounds; then nothing runs.
        """
        held = [np.ascontiguousarray(array, np.int32) for array in arrays]
        ids, _, contexts, tables, sampled = held
        assert logits.flags.c_contiguous
        assert len(logits) >= len(sampled)
        pointers = [array.ctypes.data for array in (*held, logits)]
        step = _Step(len(ids), len(contexts), len(sampled), tables.shape[1], *pointers)
        if self._library.ostinato_start(self._handle, ctypes.byref(step), self._error, _ERROR_SIZE):
            shape = f"{len(ids)} tokens in {len(contexts)} rows"
            raise DeviceError(f"the kernels refused a step of {shape}: {self._told()}")
        self._held = (*held, logits)

    def wait(self) -> None:
        """Block until the step is done; other Python threads run meanwhile."""
        self._library.ostinato_wait(self._handle)
        self._held = ()

    def close(self) -> None:
        """Wait for a running step, end the threads, give the cache back. May be called again."""
        if self._handle:
            self._library.ostinato_close(self._handle)
            self._handle = None

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


def _map_weights(path: Path, record: DecoderRecord) -> NDArray[np.uint8]:
    found = path.stat().st_size
    if found != record.weight_bytes:
        raise BundleError(f"{path} has {found} bytes, its record says {record.weight_bytes}: build the bundle again")
    return np.memmap(path, np.uint8, "r")


def _model(record: DecoderRecord, sizes: ModelSizes, base: int) -> _Model:
    layers = (_Layer * len(record.layers))(*(_layer(layer, base) for layer in record.layers))
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
        base + record.rope_cos,
        base + record.rope_sin,
        base + record.final_norm,
        _matrix(record.embedding, base),
        _matrix(record.head or record.embedding, base),
        layers,
    )


def _layer(layer: DecoderLayer, base: int) -> _Layer:
    return _Layer(
        *(_matrix(matrix, base) for matrix in layer.matrices()),
        base + layer.attention_norm,
        base + layer.mlp_norm,
        _at(layer.q_norm, base),
        _at(layer.k_norm, base),
    )


def _matrix(matrix: Matrix, base: int) -> _Matrix:
    return _Matrix(base + matrix.tiles, _at(matrix.bias, base), matrix.bits, matrix.rows, matrix.columns)


def _at(offset: int | None, base: int) -> int | None:
    return None if offset is None else base + offset

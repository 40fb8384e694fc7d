"""FusedSampling in compiled C, called through ctypes: `plugins/x86/sampler.h` in Python (runs per step).

An array's address costs a microsecond to ask for, so a step's numbers are copied into arrays whose addresses are known.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence

import numpy as np

from ostinato.engines.errors import BundleError, DeviceError
from ostinato.plugins.fused_sampling import NO_TOKEN, WORD_BITS
from ostinato.plugins.sampling_rows import F32, I32, Sampled, SamplingRows

_ERROR_SIZE = 256
_FLOATS = ("uniforms", "temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_INTS = ("top_k", "num_logprobs")
_POINTERS = (
    *("logits", "uniforms", "temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency"),
    *("num_logprobs", "allowed", "bias_ids", "bias_values", "prompt_counts", "output_counts"),
    *("tokens", "logprobs", "top_ids", "top_logprobs"),
)

_Counts = Sequence[I32 | None]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_rows", "num_biases", "mask_words", "num_slots")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


class X86Sampler:
    """FusedSampling for logits in host memory, with the oracle's semantics. One caller at a time; `close` when done.

    `library`: compiled kernels. `vocab_size`: V, of every call. `num_threads`: rows sampled at once, the caller's
    thread among them. Raises BundleError for a library without the sampler, DeviceError where threads are refused.
    """

    def __init__(self, library: ctypes.CDLL, vocab_size: int, num_threads: int) -> None:
        assert min(vocab_size, num_threads) >= 1
        self._library = _declared(library)
        self._vocab_size = vocab_size
        self._error = ctypes.create_string_buffer(_ERROR_SIZE)
        self._step = _Step()
        self._make_room(1)
        self._prompt_counts, self._output_counts = _Addresses(vocab_size), _Addresses(vocab_size)
        self._handle: int | None = library.ostinato_sampler_open(vocab_size, num_threads, self._error, _ERROR_SIZE)
        if not self._handle:
            raise DeviceError(f"the sampler did not open: {self._told()}; give it fewer threads or more memory")

    def sample(self, logits: F32, rows: SamplingRows) -> Sampled:
        """Sample logits [S, V], f32 and C-contiguous. A row in error gives token -1 and leaves the others alone.

        Raises DeviceError for a bias on a token that the vocabulary lacks; then no row was sampled.
        """
        count = len(logits)
        assert self._handle, "the sampler is closed"
        assert logits.dtype == np.float32
        assert logits.flags.c_contiguous
        assert logits.shape[1] == self._vocab_size
        if count > self._room:
            self._make_room(count)
        for line, name in zip(self._floats, _FLOATS, strict=True):
            line[:count] = getattr(rows, name)
        for line, name in zip(self._ints, _INTS, strict=True):
            line[:count] = getattr(rows, name)
        width = max(0, int(rows.num_logprobs.max(initial=0)))
        sampled = Sampled(
            tokens=np.full(count, NO_TOKEN, np.int32),
            logprobs=np.full(count, np.nan, np.float32),
            top_ids=np.empty((count, width), np.int32),
            top_logprobs=np.empty((count, width), np.float32),
        )
        held = self._point(logits, rows, sampled)
        if self._library.ostinato_sample(self._handle, ctypes.byref(self._step), self._error, _ERROR_SIZE):
            raise DeviceError(f"the sampler refused a step of {count} rows: {self._told()}")
        del held  # lived until here
        return sampled

    def close(self) -> None:
        """End the threads. May be called again."""
        handle, self._handle = self._handle, None
        if handle:
            self._library.ostinato_sampler_close(handle)

    def _make_room(self, count: int) -> None:
        """For a step of `count` rows."""
        self._room = count
        self._floats: F32 = np.zeros((len(_FLOATS), count), np.float32)
        self._ints: I32 = np.zeros((len(_INTS), count), np.int32)
        for names, array in ((_FLOATS, self._floats), (_INTS, self._ints)):
            for line, name in enumerate(names):
                setattr(self._step, name, array[line].ctypes.data)

    def _point(self, logits: F32, rows: SamplingRows, sampled: Sampled) -> Sequence[object]:
        """Tell the kernels where this step's arrays are; what is returned must live while they run."""
        step = self._step
        step.num_rows, step.num_slots = sampled.top_ids.shape
        step.logits = logits.ctypes.data
        step.tokens, step.logprobs = sampled.tokens.ctypes.data, sampled.logprobs.ctypes.data
        if step.num_slots:
            step.top_ids, step.top_logprobs = sampled.top_ids.ctypes.data, sampled.top_logprobs.ctypes.data
        held: list[object] = []
        step.allowed = None
        if rows.allowed is not None:
            allowed = np.ascontiguousarray(rows.allowed, np.int32)
            assert allowed.shape == (len(logits), -(-self._vocab_size // WORD_BITS))
            step.mask_words, step.allowed = allowed.shape[1], allowed.ctypes.data
            held.append(allowed)
        step.num_biases = rows.bias_ids.shape[1]
        if step.num_biases:
            ids, values = (
                np.ascontiguousarray(rows.bias_ids, np.int32),
                np.ascontiguousarray(rows.bias_values, np.float32),
            )
            assert ids.shape == values.shape == (len(logits), step.num_biases)
            step.bias_ids, step.bias_values = ids.ctypes.data, values.ctypes.data
            held += ids, values
        assert len(rows.prompt_counts) == len(rows.output_counts) == len(logits)
        step.prompt_counts = self._prompt_counts.of(rows.prompt_counts)
        step.output_counts = self._output_counts.of(rows.output_counts)
        return held

    def _told(self) -> str:
        return self._error.value.decode(errors="replace")


class _Addresses:
    """Where counts [V] are, row by row. An array that the last step had is not asked again."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: list[I32 | None] = []  # held, so that an id is of one array
        self._known: dict[int, int] = {}  # id → address
        self._addresses: ctypes.Array[ctypes.c_void_p] | None = None

    def of(self, counts: _Counts) -> int | None:
        """The address of their addresses, good until the next call; None where nothing is counted."""
        if len(counts) != len(self._counts) or not all(map(operator.is_, counts, self._counts)):
            known = self._known
            self._known = {id(one): known.get(id(one)) or self._address(one) for one in counts if one is not None}
            self._counts = list(counts)
            places = [None if one is None else self._known[id(one)] for one in counts]
            self._addresses = (ctypes.c_void_p * len(places))(*places) if self._known else None
        return None if self._addresses is None else ctypes.addressof(self._addresses)

    def _address(self, counts: I32) -> int:
        assert counts.shape == (self._vocab_size,)
        assert counts.dtype == np.int32
        assert counts.flags.c_contiguous
        return counts.ctypes.data


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    try:
        library.ostinato_sampler_open.restype = pointer
        library.ostinato_sampler_open.argtypes = [ctypes.c_int32, ctypes.c_int32, pointer, size]
        library.ostinato_sample.argtypes = [pointer, pointer, pointer, size]
        library.ostinato_sampler_close.restype = None
        library.ostinato_sampler_close.argtypes = [pointer]
    except AttributeError:
        raise BundleError(f"{library._name} has no sampler: build the bundle again") from None
    return library

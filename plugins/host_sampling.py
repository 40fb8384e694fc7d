"""The host kernel of FusedSampling: rows in a loop, over a few threads where it pays (per step)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from .fused_sampling import GREEDY_BELOW, NO_TOKEN, WORD_BITS
from .host_sampling_row import RowArguments, RowSample, RowSampler
from .sampling_rows import F32, I32, Sampled, SamplingRows

_WORTH_A_THREAD = 65_536  # logits in rows that are more than an argmax: about 0.3 ms of work


class HostSampler:
    """FusedSampling for logits in host memory, with the oracle's semantics. One caller at a time; `close` when done.

    `vocab_size`: V, of every call. `threads`: rows sampled at once, the caller's thread among them.
    """

    def __init__(self, vocab_size: int, threads: int = 2) -> None:
        assert min(vocab_size, threads) >= 1
        self._vocab_size = vocab_size
        self._samplers = [RowSampler(vocab_size) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads - 1, "sampler") if threads > 1 else None

    def sample(self, logits: F32, rows: SamplingRows) -> Sampled:
        """Sample logits [S, V], f32 and C-contiguous. A row in error gives token -1 and leaves the others alone."""
        assert logits.dtype == np.float32
        assert logits.flags.c_contiguous
        assert logits.shape[1] == self._vocab_size
        count = len(logits)
        samples = _empty(count, max(0, int(rows.num_logprobs.max(initial=0))))
        lines = _Lines(rows, self._vocab_size)
        heavy = count - int(np.count_nonzero(lines.is_argmax))
        workers = min(len(self._samplers), heavy) if heavy * self._vocab_size >= _WORTH_A_THREAD else 1
        queue = iter(range(count))  # shared: whoever is free takes the next row
        if self._pool is None or workers <= 1:
            _run(self._samplers[0], logits, lines, queue, samples)
            return samples
        others = [
            self._pool.submit(_run, sampler, logits, lines, queue, samples) for sampler in self._samplers[1:workers]
        ]
        _run(self._samplers[0], logits, lines, queue, samples)
        for other in others:
            other.result()
        return samples

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()


class _Lines:
    """SamplingRows as one RowArguments a row."""

    def __init__(self, rows: SamplingRows, vocab_size: int) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._scalars = list(
            zip(
                *(array.tolist() for array in (rows.uniforms, rows.temperature, rows.top_k, rows.top_p, rows.min_p)),
                strict=True,
            )
        )
        count = len(self._scalars)
        self._is_masked = np.zeros(count, np.bool_) if rows.allowed is None else _is_masked(rows.allowed, vocab_size)
        self._is_penalised = (rows.repetition != 1) | (rows.presence != 0) | (rows.frequency != 0)
        is_biased = (rows.bias_ids >= 0).any(axis=1)
        is_greedy = (rows.temperature < np.float32(GREEDY_BELOW)) & (rows.num_logprobs < 0)
        self.is_argmax = is_greedy & ~(self._is_masked | self._is_penalised | is_biased)

    def __getitem__(self, row: int) -> RowArguments:
        rows = self._rows
        uniform, temperature, top_k, top_p, min_p = self._scalars[row]
        penalised = self._is_penalised[row]
        allowed = None
        if rows.allowed is not None and self._is_masked[row]:
            octets = np.ascontiguousarray(rows.allowed[row]).astype("<i4", copy=False).view(np.uint8)
            allowed = np.unpackbits(octets, count=self._vocab_size, bitorder="little").view(np.bool_)
        return RowArguments(
            uniform=uniform,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition=rows.repetition[row],
            presence=rows.presence[row],
            frequency=rows.frequency[row],
            allowed=allowed,
            bias_ids=rows.bias_ids[row],
            bias_values=rows.bias_values[row],
            prompt_counts=rows.prompt_counts[row] if penalised else None,
            output_counts=rows.output_counts[row] if penalised else None,
            num_logprobs=min(int(rows.num_logprobs[row]), self._vocab_size),
        )


def _run(sampler: RowSampler, logits: F32, lines: _Lines, queue: Iterator[int], samples: Sampled) -> None:
    # A NaN or infinite logit shows in the row's token, and underflow is what small weights do: no warnings.
    with np.errstate(all="ignore"):
        for row in queue:
            if lines.is_argmax[row]:
                token = int(logits[row].argmax())
                samples.tokens[row] = token if np.isfinite(logits[row, token]) else NO_TOKEN
            else:
                _store(samples, row, sampler.sample(logits[row], lines[row]))


def _store(samples: Sampled, row: int, sample: RowSample) -> None:
    samples.tokens[row] = sample.token
    samples.logprobs[row] = sample.logprob
    if sample.top_ids is not None and sample.top_logprobs is not None:
        samples.top_ids[row, : len(sample.top_ids)] = sample.top_ids
        samples.top_logprobs[row, : len(sample.top_ids)] = sample.top_logprobs


def _empty(count: int, width: int) -> Sampled:
    return Sampled(
        tokens=np.full(count, NO_TOKEN, np.int32),
        logprobs=np.full(count, np.nan, np.float32),
        top_ids=np.full((count, width), NO_TOKEN, np.int32),
        top_logprobs=np.full((count, width), np.nan, np.float32),
    )


def _is_masked(allowed: I32, vocab_size: int) -> NDArray[np.bool_]:
    """Which rows [S] of masks [S, W] forbid anything."""
    whole, left = divmod(vocab_size, WORD_BITS)
    masked: NDArray[np.bool_] = (allowed[:, :whole] != -1).any(axis=1)
    if left:
        last = (1 << left) - 1
        masked |= (allowed[:, whole] & last) != last
    return masked

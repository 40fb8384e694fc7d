"""Steps for StatefulSampling's kernels: rows of every kind, and the launches over poisoned scratch (in tests)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.io_table import BIAS_PAD, DEVICE_SAMPLING_INPUTS, IN_PROMPT
from ostinato.engines.program import StepShape
from ostinato.plugins.operator_shapes import SamplingShape
from ostinato.plugins.stateful_sampling import STATEFUL_SAMPLING
from ostinato.plugins.stateful_sampling_launch import stateful_sampling_launches, stateful_sampling_scratch
from tests.interpreter import run_launches

Array = NDArray[Any]
Step = dict[str, Array]
SLOTS = 6  # K
ROW_INPUTS = ("logits", *(tensor.name for tensor in DEVICE_SAMPLING_INPUTS if tensor.shape == ("S",)))
NEUTRAL = {
    "uniforms": 0.5, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0,
    "frequency": 0.0, "mask_rows": -1, "num_logprobs": -1,
}  # fmt: skip


def plain_step(logits: Array, max_bias: int = 4, slots: int = SLOTS, **given: Any) -> Step:
    """Neutral rows over empty state lines 1, 2 …, but for what is given: a number, or an array [S]."""
    count, size = logits.shape
    step: Step = {
        "logits": logits,
        "state_rows": np.arange(1, count + 1, dtype=np.int32),
        "allowed": np.full((count, -(-size // 32)), -1, np.int32),
        "logprob_slots": np.zeros(slots, np.int32),
        "bias_ids": np.full((count + 1, max_bias), BIAS_PAD, np.int32),
        "bias_values": np.zeros((count + 1, max_bias), np.float32),
        "counts": np.zeros((count + 1, size), np.int32),
    }
    for name, neutral in NEUTRAL.items():
        dtype = np.float32 if isinstance(neutral, float) else np.int32
        step[name] = np.full(count, given.pop(name, neutral)).astype(dtype)
    return step | given


def mixed_step(rng: np.random.Generator, count: int, size: int) -> Step:
    """Rows of every kind, mixed; some without a legal token."""
    logits = (rng.standard_normal((count, size)) * rng.choice([0.3, 1, 4], (count, 1))).astype(np.float32)
    tied = rng.random(count) < 0.3
    logits[tied] = np.round(logits[tied] * 2) / 2
    logits[rng.random((count, size)) < 0.02] = -np.inf
    broken = rng.random(count) < 0.03
    logits[broken, rng.integers(0, size)] = rng.choice([np.nan, np.inf])
    step = plain_step(
        logits,
        uniforms=rng.random(count, np.float32),
        temperature=rng.choice(
            [0, 1e-6, 1e-3, 0.3, 0.8, 1, 2, 1e4], count, p=[0.1, 0.05, 0.05, 0.2, 0.2, 0.2, 0.1, 0.1]
        ),
        top_k=rng.choice([0, 0, 0, -1, 1, 3, 20, 60, size - 1, size, 10**9], count),
        top_p=rng.choice([0, 0.1, 0.5, 0.9, 0.99, 1, 1, 1], count),
        min_p=rng.choice([0, 0, 0, 0.01, 0.2, 1], count),
        repetition=rng.choice([1, 1.2, 0.8], count),
        presence=rng.choice([0, 0.5, -1], count),
        frequency=rng.choice([0, 0.25, -0.1], count),
        state_rows=rng.permutation(count).astype(np.int32) + 1,
        mask_rows=np.where(rng.random(count) < 0.5, -1, rng.integers(0, count, count)).astype(np.int32),
        num_logprobs=rng.choice([-1, 0, 1, SLOTS], count),
    )
    step["allowed"] = rng.integers(-(2**31), 2**31, step["allowed"].shape, np.int32)
    step["allowed"][rng.random(count) < 0.1] = 0
    lines = step["bias_ids"].shape
    ids = np.where(rng.random(lines) < 0.4, BIAS_PAD, rng.integers(0, size, lines))
    step["bias_ids"] = np.sort(ids, axis=1).astype(np.int32)
    step["bias_values"] = rng.uniform(-10, 10, lines).astype(np.float32)
    counts = rng.integers(0, 4, (count + 1, size)) * (rng.random((count + 1, size)) < 0.2)
    step["counts"] = (counts + IN_PROMPT * (rng.random(counts.shape) < 0.1)).astype(np.int32)
    return step


def run_kernels(step: Mapping[str, Array]) -> dict[str, Array]:
    """The launches in the interpreter, over copies; outputs and scratch hold garbage before."""
    (count, size), slots = step["logits"].shape, len(step["logprob_slots"])
    max_bias = step["bias_ids"].shape[1]
    shape, form = (
        SamplingShape(size, step["logits"].dtype.name, max_bias, slots, count),
        StepShape("decode", count, count),
    )
    tensors = {name: array.copy() for name, array in step.items()}
    tensors["counts_out"] = tensors["counts"]
    tensors |= {"tokens": np.full(count, 3, np.int32), "logprobs": np.full(count, 3, np.float32)}
    tensors |= {
        "top_ids": np.full((count, slots), 3, np.int32),
        "top_logprobs": np.full((count, slots), 3, np.float32),
    }
    for scratch in stateful_sampling_scratch(shape, [form]):
        tensors[scratch.name] = np.full([int(dim) for dim in scratch.shape], 1 << 20, scratch.dtype)
    run_launches(stateful_sampling_launches(shape, form), tensors)
    return {name: tensors[name] for name in STATEFUL_SAMPLING.outputs}


def take_rows(step: Mapping[str, Array], which: Array) -> Step:
    """The rows `which` as a step of their own, over the same state."""
    return {**step, **{name: step[name][which] for name in ROW_INPUTS}}


def with_pads(step: Mapping[str, Array], places: Array) -> Step:
    """The step with its rows at `places` of a longer one; what lies between are pads that hold poison."""
    count = int(places.max()) + 3
    wild = {"mask_rows": 10**9, "num_logprobs": 10**6, "top_k": -(2**31), "state_rows": 0}
    padded = dict(step)
    for name in ROW_INPUTS:
        array = step[name]
        poison: Any = np.nan if array.dtype.kind == "f" else wild[name]
        padded[name] = np.full((count, *array.shape[1:]), poison, array.dtype)
        padded[name][places] = array
    return padded

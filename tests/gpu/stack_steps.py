"""Random ragged steps for a decoder on a GPU: rows at any context, some fed by the step before (in tests)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.program import StepShape
from ostinato.engines.sizes import MAX_LOGPROBS
from tests.sampling_steps import NEUTRAL

from .stack_program import StackSizes

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class StackStep:
    """One step's inputs, padded to `shape`."""

    shape: StepShape
    inputs: Mapping[str, NDArray[Any]]
    live_tokens: int
    live_rows: int
    mask_lines: int = 0  # every row may give all


def random_steps(stack: StackSizes, seed: int, count: int, shapes: Sequence[StepShape] = ()) -> list[StackStep]:
    """Any of the shapes (all of the stack's unless given), any number of live rows and tokens."""
    rng, among = np.random.default_rng(seed), shapes or stack.shapes
    steps: list[StackStep] = []
    for _ in range(count):
        shape = among[int(rng.integers(len(among)))]
        steps.append(_random_step(rng, stack, shape, steps[-1].live_rows if steps else 0))
    return steps


def full_step(stack: StackSizes, shape: StepShape, context: int) -> StackStep:
    """Every row live, at one context; greedy."""
    new = [shape.tokens // shape.rows] * shape.rows
    step = _step(np.random.default_rng(5), stack, shape, new, [context] * shape.rows)
    step.inputs["temperature"][:] = 0
    return step


def _random_step(rng: np.random.Generator, stack: StackSizes, shape: StepShape, fed_from: int) -> StackStep:
    rows = int(rng.integers(1, shape.rows + 1))
    room = stack.limits.max_blocks_per_row * stack.limits.block_size
    new = [1] * rows
    if shape.phase == "prefill":
        new[-1] = int(rng.integers(1, min(shape.tokens - rows + 1, room) + 1))
    step = _step(rng, stack, shape, new, [int(rng.integers(0, room - count + 1)) for count in new])
    if fed_from:
        fed = rng.random(rows) < 0.5
        starts = step.inputs["query_starts"][:rows][fed]
        step.inputs["feed_rows"][starts] = rng.integers(0, fed_from, len(starts))
    return step


def _step(
    rng: np.random.Generator, stack: StackSizes, shape: StepShape, new: Sequence[int], cached: Sequence[int]
) -> StackStep:
    limits, rows, tokens = stack.limits, len(new), sum(new)
    inputs: Arrays = _sampling_inputs(rng, stack, shape, rows)
    inputs["input_ids"] = rng.integers(0, stack.sizes.vocab_size, shape.tokens).astype(np.int32)  # pads are anything
    inputs["feed_rows"] = np.full(shape.tokens, -1, np.int32)
    positions, slots = (np.zeros(shape.tokens, np.int32) for _ in range(2))
    starts = np.full(shape.rows + 1, tokens, np.int32)
    starts[: rows + 1] = np.cumsum([0, *new])
    context = np.zeros(shape.rows, np.int32)
    context[:rows] = cached
    tables = np.zeros((shape.rows, limits.max_blocks_per_row), np.int32)
    free = iter(rng.permutation(np.arange(1, limits.num_blocks)))
    for row, (count, past) in enumerate(zip(new, cached, strict=True)):
        mine = [next(free) for _ in range(-(-(past + count) // limits.block_size))]
        tables[row, : len(mine)] = mine
        at = np.arange(past, past + count)
        span = slice(starts[row], starts[row + 1])
        positions[span] = at
        slots[span] = tables[row, at // limits.block_size] * limits.block_size + at % limits.block_size
    indices = np.zeros(shape.rows, np.int32)
    indices[:rows] = starts[1 : rows + 1] - 1
    inputs |= {
        "positions": positions, "slot_mapping": slots, "query_starts": starts, "context_lens": context,
        "block_tables": tables, "logits_indices": indices,
    }  # fmt: skip
    return StackStep(shape, inputs, tokens, rows)


def _sampling_inputs(rng: np.random.Generator, stack: StackSizes, shape: StepShape, rows: int) -> Arrays:
    inputs: Arrays = {
        name: np.full(shape.rows, neutral, np.float32 if isinstance(neutral, float) else np.int32)
        for name, neutral in NEUTRAL.items()
    }
    inputs["uniforms"] = rng.random(shape.rows, np.float32)
    inputs["temperature"] = rng.choice([0, 0.7, 1.0], shape.rows).astype(np.float32)
    inputs["top_k"] = rng.choice([0, 1, 20], shape.rows).astype(np.int32)
    inputs["top_p"] = rng.choice([0.5, 0.9, 1.0], shape.rows).astype(np.float32)
    inputs["num_logprobs"] = rng.choice([-1, 0, 5], shape.rows).astype(np.int32)
    inputs["state_rows"] = np.zeros(shape.rows, np.int32)
    inputs["state_rows"][:rows] = 1 + rng.permutation(stack.limits.max_rows)[:rows]
    inputs["allowed"] = np.full((shape.rows, -(-stack.sizes.vocab_size // 32)), -1, np.int32)
    inputs["logprob_slots"] = np.zeros(MAX_LOGPROBS, np.int32)
    return inputs

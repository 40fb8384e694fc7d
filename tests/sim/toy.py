"""A made-up program of three kernels with caches, state, masks and shared weights, and what it must compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.program import (
    Buffer,
    KernelCall,
    KernelInfo,
    KernelLaunch,
    Program,
    StepShape,
)
from ostinato.engines.sizes import Limits, ModelSizes

from .driver import SimDriver
from .kernels import Grid, SimKernel
from .memory import DeviceMemory

V, W, D, BLOCK = 64, 2, 8, 4
LIMITS = Limits(
    block_size=BLOCK, max_rows=4, max_step_tokens=8, max_context=16, kv_tokens=32, row_buckets=(1, 2, 4),
    token_buckets=(1, 2, 4, 8),
)  # fmt: skip
SIZES = ModelSizes("toy", V, D, D, 1, 1, 1, D, 16)
SHAPES = (*(StepShape("decode", rows, rows) for rows in LIMITS.row_buckets), StepShape("prefill", 8, 4))
SLOTS = LIMITS.num_blocks * BLOCK
KERNELS = {  # kernel → its formals
    "embed": ("input_ids", "query_starts", "slot_mapping", "table", "cache", "hidden"),
    "weigh": ("hidden", "scale", "logits_indices", "state_rows", "counts", "partial"),
    "pick": ("partial", "allowed", "mask_rows", "state_rows", "counts", "tokens", "sums"),
}
BUFFERS = (
    Buffer("allowed", "int32", ("S", W), "input"),  # before the others, though it must lie behind them
    Buffer("input_ids", "int32", ("T",), "input"),
    Buffer("table", "float32", (V, D), "weight", 0),
    Buffer("query_starts", "int32", ("B+1",), "input"),
    Buffer("slot_mapping", "int32", ("T",), "input"),
    Buffer("cache.0", "float32", ("N", BLOCK, D), "cache"),
    Buffer("cut_0", "float32", ("T", D), "cut"),
    Buffer("scale", "float32", (D,), "weight", V * D * 4),
    Buffer("logits_indices", "int32", ("S",), "input"),
    Buffer("state_rows", "int32", ("S",), "input"),
    Buffer("mask_rows", "int32", ("S",), "input"),
    Buffer("bias_ids", "int32", ("R", "M"), "state"),
    Buffer("counts", "int32", ("R", V), "state"),
    Buffer("tokens", "int32", ("S",), "output"),
    Buffer("sums", "float32", ("S",), "output"),
    Buffer("toy.partial", "float32", (4,), "scratch"),
)
Arrays = dict[str, NDArray[Any]]


def toy_program() -> Program:
    arguments = {formal: formal for formals in KERNELS.values() for formal in formals}
    arguments |= {"cache": "cache.0", "hidden": "cut_0", "partial": "toy.partial"}
    launches = {
        shape.key: tuple(KernelLaunch(kernel_name(name, shape), (1, 1, 1), KERNELS[name]) for name in KERNELS)
        for shape in SHAPES
    }
    kernels = {kernel_name(name, shape): KernelInfo(name, 4, 0, 1, 32, 0) for name in KERNELS for shape in SHAPES}
    return Program(BUFFERS, (KernelCall("toy", "Toy", arguments),), SHAPES, {"Toy": launches}, {"sm_90": kernels})


def kernel_name(name: str, shape: StepShape) -> str:
    return f"{name}_{shape.key.replace(' ', '_')}"


def weights() -> Arrays:
    rng = np.random.default_rng(3)
    return {"table": rng.normal(size=(V, D)).astype(np.float32), "scale": rng.normal(size=D).astype(np.float32)}


def write_files(folder: Path) -> None:
    """weights.bin, and cubins that hold their names."""
    (folder / "weights.bin").write_bytes(b"".join(array.tobytes() for array in weights().values()))
    (folder / "sm_90").mkdir()
    for shape in SHAPES:
        for name in KERNELS:
            (folder / "sm_90" / f"{kernel_name(name, shape)}.cubin").write_text(kernel_name(name, shape))


def register_kernels(driver: SimDriver) -> None:
    for shape in SHAPES:
        for name, body in (("embed", _embed), ("weigh", _weigh), ("pick", _pick)):
            kernel = SimKernel(kernel_name(name, shape), partial(body, shape), len(KERNELS[name]), 1)
            driver.kernels.register(kernel)


def _embed(shape: StepShape, memory: DeviceMemory, grid: Grid, pointers: tuple[int, ...]) -> None:
    ids, starts, slots, table, cache, hidden = (
        memory.view(pointer, dtype, size)
        for pointer, (dtype, size) in zip(
            pointers,
            (
                ("int32", (shape.tokens,)),
                ("int32", (shape.rows + 1,)),
                ("int32", (shape.tokens,)),
                ("float32", (V, D)),
                ("float32", (SLOTS, D)),
                ("float32", (shape.tokens, D)),
            ),
            strict=True,
        )
    )
    for token in range(shape.tokens):
        if token >= starts[-1]:
            hidden[token] = 0
            continue
        hidden[token] = table[ids[token]] + np.float32(0.5) * cache[slots[token]]
        cache[slots[token]] = hidden[token]


def _weigh(shape: StepShape, memory: DeviceMemory, grid: Grid, pointers: tuple[int, ...]) -> None:
    hidden = memory.view(pointers[0], "float32", (shape.tokens, D))
    scale = memory.view(pointers[1], "float32", (D,))
    indices, rows = (memory.view(pointer, "int32", (shape.rows,)) for pointer in pointers[2:4])
    counts = memory.view(pointers[4], "int32", (LIMITS.num_state_lines, V))
    sums = memory.view(pointers[5], "float32", (4,))
    for row in range(shape.rows):
        sums[row] = (hidden[indices[row]] * scale).sum() + np.float32(counts[rows[row]].sum())


def _pick(shape: StepShape, memory: DeviceMemory, grid: Grid, pointers: tuple[int, ...]) -> None:
    sums = memory.view(pointers[0], "float32", (4,))
    masks, states = (memory.view(pointer, "int32", (shape.rows,)) for pointer in pointers[2:4])
    counts = memory.view(pointers[4], "int32", (LIMITS.num_state_lines, V))
    tokens = memory.view(pointers[5], "int32", (shape.rows,))
    memory.view(pointers[6], "float32", (shape.rows,))[:] = sums[: shape.rows]
    for row in range(shape.rows):
        token = int(abs(sums[row]) * 997) % V
        if masks[row] >= 0:  # what is not used may not be read: it may never have gone up
            words = memory.view(pointers[1], "int32", (shape.rows, W))
            token = token if (int(words[masks[row], token // 32]) >> (token % 32)) & 1 else -1
        tokens[row] = token
        if states[row] > 0 and token >= 0:
            counts[states[row], token] += 1


@dataclass(frozen=True)
class ToyStep:
    """One step's inputs, padded to `shape`; `mask_lines` of `allowed` count."""

    shape: StepShape
    inputs: Arrays
    live_tokens: int
    live_rows: int
    mask_lines: int


def random_steps(seed: int, count: int, shapes: Sequence[StepShape] = SHAPES) -> list[ToyStep]:
    """Any of the shapes, any number of live rows and tokens, some rows masked."""
    rng = np.random.default_rng(seed)
    return [_random_step(rng, shapes[int(rng.integers(len(shapes)))]) for _ in range(count)]


def _random_step(rng: np.random.Generator, shape: StepShape) -> ToyStep:
    live = int(rng.integers(1, shape.rows + 1))
    tokens = live if shape.phase == "decode" else int(rng.integers(live, shape.tokens + 1))
    starts = np.full(shape.rows + 1, tokens, np.int32)
    starts[:live] = np.arange(live)  # the last live row has all that are left
    ids, slots = np.zeros((2, shape.tokens), np.int32)
    ids[:tokens] = rng.integers(V, size=tokens)
    slots[:tokens] = rng.choice(np.arange(BLOCK, SLOTS), tokens, replace=False)
    indices, states = np.zeros((2, shape.rows), np.int32)
    indices[:live] = starts[1 : live + 1] - 1
    states[:live] = 1 + rng.permutation(LIMITS.max_rows)[:live]
    num_masks = int(rng.integers(0, live + 1))
    masks = np.full(shape.rows, -1, np.int32)
    masks[:num_masks] = rng.permutation(num_masks)
    allowed = rng.integers(-(2**31), 2**31, size=(shape.rows, W)).astype(np.int32)
    inputs: Arrays = {
        "input_ids": ids, "query_starts": starts, "slot_mapping": slots, "logits_indices": indices,
        "state_rows": states, "mask_rows": masks, "allowed": allowed,
    }  # fmt: skip
    return ToyStep(shape, inputs, tokens, live, num_masks)


def expected(steps: Sequence[ToyStep]) -> list[Arrays]:
    """Tokens and sums of the live rows, step by step, from the inputs alone."""
    table, scale = weights().values()
    cache, counts = np.zeros((SLOTS, D), np.float32), np.zeros((LIMITS.num_state_lines, V), np.int32)
    results = []
    for step in steps:
        ids, slots = (step.inputs[name][: step.live_tokens] for name in ("input_ids", "slot_mapping"))
        cache[slots] = hidden = table[ids] + np.float32(0.5) * cache[slots]
        states = step.inputs["state_rows"][: step.live_rows]
        products = hidden[step.inputs["logits_indices"][: step.live_rows]] * scale
        sums = np.array([one.sum() for one in products], np.float32) + counts[states].sum(1).astype(np.float32)
        tokens = (np.abs(sums) * np.float32(997)).astype(np.int64) % V
        for row, line in enumerate(step.inputs["mask_rows"][: step.live_rows]):
            bits = np.unpackbits(step.inputs["allowed"].view(np.uint8), axis=1, bitorder="little")
            if line >= 0 and not bits[line, tokens[row]]:
                tokens[row] = -1
        for state, token in zip(states, tokens, strict=True):
            counts[state, token] += token >= 0
        results.append({"tokens": tokens.astype(np.int32), "sums": sums})
    return results


def same(results: Sequence[Arrays], wanted: Sequence[Arrays]) -> bool:
    """Bit for bit."""
    return len(results) == len(wanted) and all(
        one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)
        for one, other in zip(results, wanted, strict=True)
    )

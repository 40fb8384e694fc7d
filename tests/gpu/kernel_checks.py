"""Plugin kernels on a GPU against the oracles, on the random ragged steps of the CPU's tests (in tests)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.program import StepShape
from ostinato.plugins.cache_write import write_cache
from ostinato.plugins.feed_tokens import FORMALS, feed_tokens
from ostinato.plugins.feed_tokens_launch import feed_tokens_launches
from ostinato.plugins.operator_shapes import SamplingShape
from ostinato.plugins.paged_attention import AttentionInputs
from ostinato.plugins.paged_attention_launch import paged_attention_launches, paged_attention_scratch
from ostinato.plugins.stateful_sampling import STATEFUL_SAMPLING
from ostinato.plugins.stateful_sampling_launch import stateful_sampling_launches, stateful_sampling_scratch
from tests.attention_steps import Row, bits, expected_out, lay_out, make_row
from tests.interpreter import scratch_arrays
from tests.plugins.test_attention_kernels import TOLERANCE
from tests.plugins.test_sampling_kernels import assert_equals_oracle
from tests.sampling_steps import Step, mixed_step, take_rows, with_pads

from .cases import AttentionCase
from .gpu import Gpu, dtype_of

Array = NDArray[Any]


def attention(gpu: Gpu, case: AttentionCase, step: StepShape, inputs: AttentionInputs) -> dict[str, Array]:
    """All tensors after a step: "out" [tokens, Hq*D] and both caches among them."""
    arrays = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    arrays["out"] = np.full(inputs.q.shape, np.nan, inputs.q.dtype)
    arrays |= scratch_arrays(paged_attention_scratch(case.shape, [step], case.tiles))
    return gpu.run(paged_attention_launches(case.shape, step, case.tiles), arrays)


def blocks_for(case: AttentionCase) -> int:
    return 1 + case.shape.max_rows * case.shape.table_width


def random_rows(rng: np.random.Generator, case: AttentionCase, phase: str) -> list[Row]:
    """One to max_rows; in a prefill step some have one new token, others up to 40."""
    longest = min(40, case.max_cached // 4)
    rows = []
    for _ in range(int(rng.integers(1, case.shape.max_rows + 1))):
        new = 1 if phase == "decode" or rng.random() < 0.3 else int(rng.integers(1, longest + 1))
        cached = int(rng.integers(0, rng.choice([1, 12, case.max_cached])))
        rows.append(make_row(rng, case.shape, cached, new))
    return rows


def random_step(rng: np.random.Generator, case: AttentionCase, rows: Sequence[Row], phase: str) -> StepShape:
    pads = int(rng.integers(0, 4))
    if phase == "decode":
        return StepShape("decode", len(rows) + pads, len(rows) + pads)
    return StepShape("prefill", sum(len(row.q) for row in rows) + pads, case.shape.max_rows)


def check_attention(gpu: Gpu, case: AttentionCase, seed: int, phases: Sequence[str]) -> None:
    """Output within the CPU tests' tolerance, caches to the bit; pads give zeros, poison reaches nothing."""
    rng = np.random.default_rng([seed, *map(ord, case.name)])
    for phase in phases:
        rows = random_rows(rng, case, phase)
        step = random_step(rng, case, rows, phase)
        inputs = lay_out(rng, case.shape, step, rows, blocks_for(case))
        written = replace(inputs, key_cache=inputs.key_cache.copy(), value_cache=inputs.value_cache.copy())
        with np.errstate(invalid="ignore"):
            write_cache(written, case.shape.block_size, case.shape.cache_dtype)
        found, live = attention(gpu, case, step, inputs), int(inputs.query_starts[-1])

        expected = expected_out(case.shape, rows)
        error = np.abs(found["out"][:live].astype(np.float32) - expected).max()
        assert error <= TOLERANCE[case.shape.dtype] * np.abs(expected).max(), (case.name, step.key)
        assert (found["out"][live:] == 0).all()
        for name in ("key_cache", "value_cache"):  # block 0 is for pads
            np.testing.assert_array_equal(bits(found[name][1:]), bits(getattr(written, name)[1:]), err_msg=name)


def check_company(gpu: Gpu, case: AttentionCase) -> None:
    """A row has the same bits alone and beside others, in any bucket, block and place, decode or prefill."""
    rng = np.random.default_rng(11)
    far = case.max_cached
    one, many = make_row(rng, case.shape, far, 1), make_row(rng, case.shape, far // 2, 9)
    others = [make_row(rng, case.shape, cached, new) for cached, new in ((3, 1), (far // 3, 1), (0, 7), (50, 4))]

    def outs(step: StepShape, rows: Sequence[Row], which: Row) -> Array:
        start = sum(len(row.q) for row in rows[: next(i for i, row in enumerate(rows) if row is which)])
        found = attention(gpu, case, step, lay_out(rng, case.shape, step, rows, blocks_for(case)))
        return bits(found["out"][start : start + len(which.q)])

    width = case.shape.max_rows
    alone = outs(StepShape("decode", 1, 1), [one], one)
    for step, rows in (
        (StepShape("decode", 4, 4), [others[1], one, others[0]]),
        (StepShape("prefill", 14, width), [others[2], one, others[3]]),
        (StepShape("prefill", 18, width), [others[0], many, one]),
    ):
        np.testing.assert_array_equal(outs(step, rows, one), alone, err_msg=step.key)
    alone = outs(StepShape("prefill", 9, width), [many], many)
    for step, rows in (
        (StepShape("prefill", 20, width), [others[2], others[0], many]),
        (StepShape("prefill", 14, width), [others[3], many, one]),
    ):
        np.testing.assert_array_equal(outs(step, rows, many), alone, err_msg=step.key)


def sampling(gpu: Gpu, step: Step) -> dict[str, Array]:
    """The operator's outputs; outputs and scratch hold garbage before."""
    (count, size), slots = step["logits"].shape, len(step["logprob_slots"])
    shape = SamplingShape(size, step["logits"].dtype.name, step["bias_ids"].shape[1], slots, count)
    form = StepShape("decode", count, count)
    arrays = {**step, "tokens": np.full(count, 3, np.int32), "logprobs": np.full(count, 3, np.float32)}
    arrays |= {"top_ids": np.full((count, slots), 3, np.int32), "top_logprobs": np.full((count, slots), 3, np.float32)}
    for scratch in stateful_sampling_scratch(shape, [form]):
        arrays[scratch.name] = np.full([int(dim) for dim in scratch.shape], 1 << 20, scratch.dtype)
    arrays["counts_out"] = arrays.pop("counts")  # one place, two names
    launches = stateful_sampling_launches(shape, form)
    gpu.prepare(launch.kernel for launch in launches)
    with gpu.put(arrays) as tensors:
        addresses = {**tensors.addresses, "counts": tensors.addresses["counts_out"]}
        gpu.launch(launches, addresses)
        found = tensors.read()
    return {name: found[name] for name in STATEFUL_SAMPLING.outputs}


def check_sampling(gpu: Gpu, size: int, seed: int, dtype: str, count: int) -> None:
    """Ids to the bit, logprobs within 1e-5, rows of every kind."""
    step = mixed_step(np.random.default_rng([size, seed]), count, size)
    step["logits"] = step["logits"].astype(dtype_of(dtype))
    assert_equals_oracle(step, sampling(gpu, step))


def check_sampling_company(gpu: Gpu, size: int, count: int) -> None:
    """A row gives the same bits alone, in a batch, and between pads that hold poison."""
    rng = np.random.default_rng([size, count])
    step = mixed_step(rng, count, size)
    places = np.sort(rng.permutation(count + 5)[:count])
    batch, padded = sampling(gpu, step), sampling(gpu, with_pads(step, places))
    names = [name for name in STATEFUL_SAMPLING.outputs if name != "counts_out"]
    for name in names:
        assert padded[name][places].tobytes() == batch[name].tobytes(), name
    assert padded["counts_out"].tobytes() == batch["counts_out"].tobytes()
    for row in range(0, count, 3):
        single = sampling(gpu, take_rows(step, np.array([row])))
        for name in names:
            assert single[name][0].tobytes() == batch[name][row].tobytes(), name


def check_feed(gpu: Gpu, step: StepShape) -> None:
    """Fed, known and padded tokens; the oracle's bits."""
    rng = np.random.default_rng(step.tokens)
    last, live = 8, max(1, step.tokens - 3)
    arrays = {
        "input_ids": rng.integers(0, 2**31 - 1, step.tokens).astype(np.int32),
        "feed_rows": np.full(step.tokens, -1, np.int32),
        "last_tokens": rng.integers(-1, 2**31 - 1, last).astype(np.int32),
    }
    arrays["last_tokens"][0] = -1
    arrays["feed_rows"][:live] = rng.integers(-1, last, live)
    found = gpu.run(feed_tokens_launches(step), arrays)
    wanted = {**arrays, "input_ids": feed_tokens(arrays)}
    for name in FORMALS:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)

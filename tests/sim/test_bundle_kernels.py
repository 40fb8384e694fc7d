"""The kernels' bodies on the simulated device: together equal to each operator's oracle, deaf to poison, in bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ostinato.engines.program import Phase, StepShape
from ostinato.plugins.cache_write import write_cache
from ostinato.plugins.feed_tokens import feed_tokens
from ostinato.plugins.feed_tokens_launch import feed_tokens_launches
from ostinato.plugins.kernel_launch import Launch
from ostinato.plugins.operator_shapes import AttentionShape, SamplingShape
from ostinato.plugins.paged_attention import AttentionAttributes, AttentionInputs
from ostinato.plugins.paged_attention_launch import Tiling, paged_attention_launches, paged_attention_scratch
from ostinato.plugins.stateful_sampling import stateful_sampling
from ostinato.plugins.stateful_sampling_launch import stateful_sampling_launches, stateful_sampling_scratch

from ..attention_steps import as_dtype, bits, expected_out, lay_out, make_row
from ..sampling_steps import SLOTS, Step, mixed_step, with_pads
from .device_launches import launch_on_device
from .memory import SimError

Array = NDArray[Any]
SMALL = Tiling(4, 16, 16, 1, 16, 16, 1, 1)  # tiles that short rows cross
HEADS = ((2, 2), (3, 1), (8, 2), (8, 1))
DTYPES = (("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "int8"),
          ("float32", "float8_e4m3"))  # fmt: skip
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}  # of the largest number


def attention_step(seed: int, dtypes: tuple[str, str], phase: Phase) -> tuple[AttentionShape, StepShape, list[Any]]:
    rng = np.random.default_rng([seed, len(phase), *map(ord, "".join(dtypes))])
    heads, block = HEADS[rng.integers(len(HEADS))], int(rng.choice([4, 8, 16]))
    window, softcap = int(rng.choice([0, 0, 1, 7, 20])), float(rng.choice([0, 0, 0.7]))
    attributes = AttentionAttributes(*heads, 32, 32**-0.5, window, softcap)
    shape = AttentionShape(attributes, *dtypes, block_size=block, table_width=-(-96 // block), max_rows=4)
    rows = []
    for _ in range(rng.integers(1, 4)):
        new = 1 if phase == "decode" or rng.random() < 0.3 else int(rng.integers(1, 17))
        rows.append(make_row(rng, shape, int(rng.integers(0, 66)), new))
    tokens, pads = sum(len(row.q) for row in rows), int(rng.integers(0, 4))
    return shape, StepShape(phase, tokens + pads, tokens + pads if phase == "decode" else 4), rows


def attend(shape: AttentionShape, step: StepShape, inputs: AttentionInputs, launches: Any) -> dict[str, Array]:
    tensors: dict[str, Array] = {name: getattr(inputs, name) for name in AttentionInputs.__dataclass_fields__}
    made = {"out": np.empty(inputs.q.shape, inputs.q.dtype)}
    for one in paged_attention_scratch(shape, (step,), SMALL):
        made[one.name] = np.empty([int(size) for size in one.shape], one.dtype)
    blocks = len(inputs.key_cache)
    return launch_on_device(launches, tensors | made, num_blocks=blocks, poisoned=tuple(made))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("dtypes", DTYPES, ids="/".join)
@pytest.mark.parametrize("seed", range(4))
def test_attention_equals_its_oracle(seed: int, dtypes: tuple[str, str], phase: Phase) -> None:
    """Pads, slots that no row owns and table entries past a row's are poison; scratch is fresh."""
    shape, step, rows = attention_step(seed, dtypes, phase)
    inputs = lay_out(np.random.default_rng(seed), shape, step, rows, 1 + 3 * shape.table_width)
    written = replace(inputs, key_cache=inputs.key_cache.copy(), value_cache=inputs.value_cache.copy())
    with np.errstate(invalid="ignore"):
        write_cache(written, shape.block_size, shape.cache_dtype)
    found = attend(shape, step, inputs, paged_attention_launches(shape, step, SMALL))
    expected, live = expected_out(shape, rows), int(inputs.query_starts[-1])
    error = np.abs(found["out"][:live].astype(np.float32) - expected).max()
    assert error <= TOLERANCE[shape.dtype] * np.abs(expected).max()
    assert (found["out"][live:] == 0).all()
    for name in ("key_cache", "value_cache"):  # every block but the null block, to the bit
        np.testing.assert_array_equal(bits(found[name][1:]), bits(getattr(written, name)[1:]))


@pytest.mark.parametrize("left_out", ["cache_write", "decode_splits", "decode_join"])
def test_every_attention_kernel_has_its_part(left_out: str) -> None:
    """Without one of them, or in another order, the result is wrong."""
    shape, step, rows = attention_step(1, DTYPES[0], "decode")
    inputs = lay_out(np.random.default_rng(1), shape, step, rows, 40)
    launches = paged_attention_launches(shape, step, SMALL)
    kept = [launch for launch in launches if launch.kernel.function != left_out]
    live = int(inputs.query_starts[-1])
    for order in (kept, [*kept, *(one for one in launches if one not in kept)] if left_out != "decode_join" else kept):
        with np.errstate(invalid="ignore"):
            try:
                found = attend(shape, step, inputs, order)["out"][:live]
            except FloatingPointError:  # poison was computed with
                continue
        assert not np.allclose(found, expected_out(shape, rows), atol=1e-4)


def test_a_slot_or_a_block_out_of_the_pool_raises() -> None:
    shape, step, rows = attention_step(2, DTYPES[0], "decode")
    for name, value in (("slot_mapping", 10**6), ("slot_mapping", -1), ("block_tables", 10**6), ("block_tables", -1)):
        inputs = lay_out(np.random.default_rng(2), shape, step, rows, 40)
        getattr(inputs, name).reshape(-1)[0] = value
        with pytest.raises(SimError, match="a kernel is given a"):
            attend(shape, step, inputs, paged_attention_launches(shape, step, SMALL))


def sample(step: Step, launches: tuple[Launch, ...] | None = None) -> dict[str, Array]:
    """All outputs, from fresh scratch and outputs; logprobs and counts too."""
    (count, size), slots = step["logits"].shape, len(step["logprob_slots"])
    shape = SamplingShape(size, step["logits"].dtype.name, step["bias_ids"].shape[1], slots, count)
    form = StepShape("decode", count, count)
    made: dict[str, Array] = {
        "tokens": np.empty(count, np.int32), "logprobs": np.empty(count, np.float32),
        "top_ids": np.empty((count, slots), np.int32), "top_logprobs": np.empty((count, slots), np.float32),
    }  # fmt: skip
    for one in stateful_sampling_scratch(shape, [form]):
        made[one.name] = np.empty([int(dim) for dim in one.shape], one.dtype)
    launches = launches or stateful_sampling_launches(shape, form)
    lines, shared = len(step["counts"]), {"counts_out": "counts"}
    found = launch_on_device(launches, step | made, num_lines=lines, poisoned=tuple(made), shared=shared)
    return found | {"counts_out": found["counts"]}


def assert_sampled(step: Step, found: dict[str, Array]) -> None:
    """Ids and counts to the bit, logprobs within 1e-5."""
    expected = stateful_sampling(step)
    for name in ("tokens", "top_ids", "counts_out"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("size", "count", "dtype"),
    [(97, 110, "float32"), (320, 64, "float32"), (1000, 40, "float32"), (1000, 20, "float16"), (1000, 20, "bfloat16"),
     (5003, 20, "float32")],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(2))
def test_sampling_equals_its_oracle(size: int, count: int, dtype: str, seed: int) -> None:
    step = mixed_step(np.random.default_rng([size, seed]), count, size)
    step["logits"] = step["logits"].astype(as_dtype(dtype))
    assert_sampled(step, sample(step))


def test_sampling_reads_nothing_of_pads() -> None:
    """Pads between rows hold NaN logits, wild masks and counts; their scratch stays poison."""
    rng = np.random.default_rng(5)
    step = with_pads(mixed_step(rng, 12, 320), np.sort(rng.permutation(20)[:12]))
    step["allowed"] = np.concatenate([step["allowed"], np.zeros((11, 10), np.int32)])[: len(step["logits"])]
    assert_sampled(step, sample(step))


@pytest.mark.parametrize("left_out", range(5))
def test_every_sampling_kernel_has_its_part(left_out: int) -> None:
    step = mixed_step(np.random.default_rng(3), 40, 320)
    form = StepShape("decode", 40, 40)
    launches = stateful_sampling_launches(SamplingShape(320, "float32", 4, SLOTS, 40), form)
    with pytest.raises((AssertionError, FloatingPointError, IndexError)):
        assert_sampled(step, sample(step, launches[:left_out] + launches[left_out + 1 :]))


@pytest.mark.parametrize("seed", range(3))
def test_feeding_equals_its_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors: dict[str, Array] = {
        "input_ids": rng.integers(0, 300, 16).astype(np.int32),
        "feed_rows": rng.integers(-1, 8, 16).astype(np.int32),
        "last_tokens": rng.integers(-1, 300, 8).astype(np.int32),
    }
    found = launch_on_device(feed_tokens_launches(StepShape("decode", 16, 16)), tensors)
    np.testing.assert_array_equal(found["input_ids"], feed_tokens(tensors))

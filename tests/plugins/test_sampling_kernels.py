"""StatefulSampling's kernels in the interpreter: equal to the oracle, deaf to neighbours and to pads, compilable."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ostinato.engines.errors import RecipeError
from ostinato.engines.io_table import BIAS_PAD, IN_PROMPT
from ostinato.engines.program import DTYPE_BYTES, StepShape
from ostinato.plugins.fused_sampling import kept_probabilities
from ostinato.plugins.kernel_launch import KernelSpec
from ostinato.plugins.operator_shapes import SamplingShape
from ostinato.plugins.stateful_sampling import stateful_sampling
from ostinato.plugins.stateful_sampling_launch import stateful_sampling_launches, stateful_sampling_scratch
from tests.interpreter import compiled_form
from tests.sampling_steps import SLOTS, Step, mixed_step, plain_step, run_kernels, take_rows, with_pads
from tests.scale import scaled

Array = NDArray[Any]
EDGE = 1e-6
BELOW_1 = 1 - 2.0**-24


def assert_equals_oracle(step: Step, found: dict[str, Array]) -> None:
    """Ids and counts to the bit, logprobs within 1e-5."""
    expected = stateful_sampling(step)
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    np.testing.assert_allclose(found["logprobs"], expected["logprobs"], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(found["top_ids"], expected["top_ids"])
    np.testing.assert_allclose(found["top_logprobs"], expected["top_logprobs"], atol=1e-5, rtol=0)
    counts = step["counts"].copy()
    for line, token in zip(step["state_rows"], found["tokens"], strict=True):
        if line and token >= 0:
            counts[line, token] += 1
    np.testing.assert_array_equal(found["counts_out"], counts)


CASES = [
    *((97, seed, "float32", scaled(70, 110)) for seed in range(scaled(2, 6))),
    *((1000, seed, "float32", 40) for seed in range(scaled(2, 6))),
    (1000, 6, "float16", 20),
    (1000, 7, "bfloat16", 20),
    *((5003, seed, "float32", 20) for seed in range(scaled(1, 3))),
]


def test_cases_are_hundreds_of_rows() -> None:
    assert sum(count for *_, count in CASES) >= scaled(220, 1000)


@pytest.mark.parametrize(("size", "seed", "dtype", "count"), CASES)
def test_kernels_equal_oracle(size: int, seed: int, dtype: str, count: int) -> None:
    """Every parameter mixed. A vocabulary of 97 is one block, of 1,000 two, of 5,003 five."""
    step = mixed_step(np.random.default_rng([size, seed]), count, size)
    step["logits"] = step["logits"].astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    oracle = stateful_sampling(step)
    assert np.count_nonzero(oracle["tokens"] >= 0) > 0.7 * count
    assert_equals_oracle(step, run_kernels(step))


def flat(count: int, value: float = 1.0, size: int = 300) -> Array:
    return np.full((count, size), value, np.float32)


def test_equal_logits_are_cut_by_id() -> None:
    """With all tokens equal, exactly k stay, or the shortest prefix that reaches p: the draw names the last of them."""
    step = plain_step(
        flat(7), uniforms=BELOW_1, top_k=[7, 0, 299, 300, 1, 0, 0], top_p=[1, 0.5, 1, 1, 1, 0, 1],
        min_p=[0, 0, 0, 0, 0, 0, 1], temperature=[1, 1, 1e4, 1e-4, 5, 5, 1],
    )  # fmt: skip
    found = run_kernels(step)
    assert found["tokens"].tolist() == [6, 149, 298, 299, 0, 0, 299]
    assert_equals_oracle(step, found)


def test_best_tokens_each_in_a_group_of_its_own() -> None:
    """The bound that the groups' bests give must hold the k-th; here it is the last in vocabulary order, so drawn."""
    logits = flat(4, -50, size=1000)
    logits[:, [100, 200, 300, 400, 999]] = [5, 4, 3, 2, 1]
    step = plain_step(logits, temperature=1e4, uniforms=BELOW_1, top_k=[5, 4, 8, 5], mask_rows=[-1, -1, -1, 0])
    step["allowed"][0] = 0
    step["allowed"][0, [100 // 32, 999 // 32]] = -1  # fewer groups than k have a legal token
    found = run_kernels(step)
    assert found["tokens"].tolist() == [999, 400, 999, 999]
    assert_equals_oracle(step, found)


def test_argmax_takes_the_lowest_id() -> None:
    """By temperature 0, k 1, p 0, and by min-p 1 with uniform 0; -0.0 is a zero; ties stand across blocks."""
    logits = np.random.default_rng(1).uniform(-5, -1, (6, 300)).astype(np.float32)
    logits[:, 299], logits[:, 280], logits[:, 254] = 0.0, 0.0, -0.0
    logits[5, 3] = np.nextafter(np.float32(0), np.float32(-1))
    step = plain_step(
        logits, temperature=[0, 1, 1, 1, 9e-6, 0], top_k=[0, 1, 0, 0, 5, 0], top_p=[1, 1, 0, 1, 0.9, 1],
        min_p=[0, 0, 0, 1, 0, 0], uniforms=[0.9, 0.9, 0.9, 0, 0.9, 0.9], num_logprobs=4,
    )  # fmt: skip
    found = run_kernels(step)
    assert found["tokens"].tolist() == [254] * 6
    assert found["top_ids"][0, :3].tolist() == [254, 280, 299]
    assert found["top_ids"][5, :4].tolist() == [254, 280, 299, 3]
    assert_equals_oracle(step, found)


def test_uniforms_at_their_ends() -> None:
    """0 draws the first token of any mass that float64 holds, and just below 1 the last of a mass that counts."""
    logits = np.random.default_rng(2).standard_normal((8, 300)).astype(np.float32)
    logits[:, :2] = -np.inf
    logits[:, 2] = [-9, -90, -500, -900, -9, -9, -9, -9]  # of these, exp(-500) is 0 in float32 and not in float64
    step = plain_step(logits, uniforms=[0, 0, 0, 0, BELOW_1, BELOW_1, BELOW_1, 0], top_k=[0] * 5 + [40, 0, 40])
    step["top_p"][6] = 0.9
    found = run_kernels(step)
    assert found["tokens"][:4].tolist() == [2, 2, 2, 3]
    assert_equals_oracle(step, found)


def test_rows_without_a_legal_token() -> None:
    """NaN or +inf anywhere, nothing but -inf, an empty mask, a mask over -inf alone, a bias of +inf; others go on."""
    logits = np.random.default_rng(3).standard_normal((9, 300)).astype(np.float32)
    logits[1, 299], logits[2, 7], logits[3] = np.nan, np.inf, -np.inf
    logits[5, :64] = -np.inf
    step = plain_step(logits, mask_rows=[-1, 0, 0, -1, 1, 2, -1, 3, -1], num_logprobs=[2, 2, -1, 2, 0, 6, 2, 2, 2])
    step["allowed"][:4] = 0
    step["allowed"][0, 0], step["allowed"][2, :2], step["allowed"][3, 9] = 1 << 5, -1, 1 << 11
    step["bias_ids"][7, 0], step["bias_values"][7, 0] = 9, np.inf
    found = run_kernels(step)
    assert (found["tokens"] >= 0).tolist() == [True, False, False, False, False, False, False, True, True]
    assert found["tokens"][7] == 9 * 32 + 11  # one bit
    assert found["top_logprobs"][5].tolist() == [-np.inf] * 6
    assert found["top_logprobs"][1, :2].tolist() == [-np.inf] * 2
    assert np.isnan(found["top_logprobs"][1, 2:]).all()
    assert_equals_oracle(step, found)


def test_bias_and_penalties_round_as_the_oracle() -> None:
    """Twice the same id in file order, ids at a block's border, a full line, products that must not fuse."""
    rng = np.random.default_rng(4)
    logits = rng.uniform(-40, 40, (6, 600)).astype(np.float32)
    step = plain_step(logits, temperature=0, num_logprobs=SLOTS, repetition=[1, 1, 1.3, 1.3, 0.7, 1.1])
    step["bias_ids"][1] = [0, 511, 512, 599]
    step["bias_ids"][2] = [5, 5, 5, BIAS_PAD]
    step["bias_values"][1], step["bias_values"][2] = 100, [1e8, 3, -1e8, 7]
    step["presence"][3:], step["frequency"][3:] = 0.1, [0.3, -0.7, 1.1]
    counts = rng.integers(1, 90, (3, 600), np.int32)
    counts[0] |= IN_PROMPT
    counts[2, ::2] = IN_PROMPT
    step["counts"][4:] = counts
    step["counts"][3, ::3] = IN_PROMPT
    found = run_kernels(step)
    assert found["top_ids"][0].tolist()[:4] != [0, 511, 512, 599]
    assert_equals_oracle(step, found)
    # Against the oracle's logits, bit for bit: a rounding of one ulp more would reorder these.
    near = plain_step(np.full((1, 600), 7.3, np.float32), temperature=0, frequency=0.37, presence=0.11, num_logprobs=6)
    near["counts"][1] = rng.integers(1000, 1004, 600)
    near["logits"][0] += (near["counts"][1] * np.float32(0.37)).astype(np.float32)
    assert_equals_oracle(near, run_kernels(near))


def test_without_bias_and_without_logprob_slots() -> None:
    step = plain_step(np.random.default_rng(5).standard_normal((3, 97)).astype(np.float32), max_bias=0, slots=0)
    step["num_logprobs"][1] = 0
    found = run_kernels(step)
    assert np.isfinite(found["logprobs"]).tolist() == [False, True, False]
    assert_equals_oracle(step, found)


@pytest.mark.parametrize("size", [1, 3, 128, 129, 1023, 1024, 1025, 2049])
def test_counts_at_the_borders_of_blocks_and_of_the_vocabulary(size: int) -> None:
    """top-k of V - 1, V, V + 1, a group, a block; top-p one step under 1; uniforms at both ends."""
    rng, under_1 = np.random.default_rng(size), np.nextafter(np.float32(1), np.float32(0))
    step = plain_step(
        rng.standard_normal((8, size)).astype(np.float32), top_k=[size - 1, size, size + 1, 128, 1024, 0, 0, -5],
        top_p=[1, 1, under_1, under_1, 0.5, under_1, 1, 0.9], uniforms=[BELOW_1] * 5 + [0, BELOW_1, 0.5],
        num_logprobs=[SLOTS, -1, 0, 3, SLOTS, 1, 2, SLOTS],
    )  # fmt: skip
    assert_equals_oracle(step, run_kernels(step))


def test_logits_at_the_ends_of_float32() -> None:
    """All alike at either end, one at each end, and a bias that dwarfs the others."""
    largest = np.finfo(np.float32).max
    logits = np.random.default_rng(8).standard_normal((4, 300)).astype(np.float32)
    logits[0], logits[1] = -largest, largest
    logits[2, :2] = largest, -largest
    step = plain_step(logits, uniforms=BELOW_1, top_p=[0.9, 1, 1, 0.9], min_p=[0, 1e-38, 0, 0], num_logprobs=SLOTS)
    step["bias_ids"][4, 0], step["bias_values"][4, 0] = 280, 1e30
    found = run_kernels(step)
    assert found["tokens"].tolist() == [269, 299, 0, 280]
    assert_equals_oracle(step, found)


def test_rows_that_share_a_line_of_the_state_both_count() -> None:
    step = plain_step(np.tile(np.random.default_rng(10).standard_normal((1, 300)), (4, 1)).astype(np.float32))
    step["temperature"][:] = 0
    step["state_rows"] = np.array([2, 2, 0, 2], np.int32)
    found = run_kernels(step)
    assert found["counts_out"].sum() == found["counts_out"][2, found["tokens"][0]] == 3


def test_more_logprobs_than_tokens() -> None:
    step = plain_step(np.random.default_rng(6).standard_normal((2, 4)).astype(np.float32), num_logprobs=SLOTS)
    assert_equals_oracle(step, run_kernels(step))


@pytest.mark.parametrize("size", [97, 1000])
def test_row_is_the_same_bits_in_any_company(size: int) -> None:
    """Alone, among others, and among poisoned pads of a larger bucket; pads report blanks and line 0 stays."""
    rng = np.random.default_rng(size)
    step = mixed_step(rng, 12, size)
    batch = run_kernels(step)
    places = rng.permutation(20)[:12]
    padded = with_pads(step, places)
    among_pads = run_kernels(padded)
    alone = {row: run_kernels(take_rows(step, np.array([row]))) for row in range(0, 12, 3)}
    for name in ("tokens", "logprobs", "top_ids", "top_logprobs"):
        assert among_pads[name][places].tobytes() == batch[name].tobytes(), name
        for row, single in alone.items():
            assert single[name][0].tobytes() == batch[name][row].tobytes(), name
    assert among_pads["counts_out"].tobytes() == batch["counts_out"].tobytes()
    np.testing.assert_array_equal(among_pads["counts_out"][0], step["counts"][0])
    pads = padded["state_rows"] == 0
    assert np.count_nonzero(pads) >= 3
    assert (among_pads["tokens"][pads] == -1).all()
    assert (among_pads["top_ids"][pads] == -1).all()
    assert np.isnan(among_pads["logprobs"][pads]).all()
    assert np.isnan(among_pads["top_logprobs"][pads]).all()


def test_kernels_at_a_real_vocabulary() -> None:
    """At 49,152 tokens the float64 mass just before and just after the token encloses the uniform."""
    size, settings = 49_152, [(0, 1.0, 0.0), (50, 0.9, 0.01), (0, 0.95, 0.0)]
    rng = np.random.default_rng(9)
    logits = (rng.standard_normal((3, size)) * [[0.5], [1], [3]]).astype(np.float32)
    top_k, top_p, min_p = zip(*settings, strict=True)
    step = plain_step(
        logits, uniforms=rng.random(3), temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, num_logprobs=SLOTS
    )
    found = run_kernels(step)
    assert_equals_oracle(step, found)
    for row, token in enumerate(found["tokens"]):
        rows: Any = type("Rows", (), step)  # the four columns that it reads have the same names
        cumulative = np.cumsum(kept_probabilities(logits[row], np.full(size, True), rows, row))
        before = cumulative[token - 1] if token else 0.0
        assert before - EDGE <= step["uniforms"][row] <= cumulative[token] + EDGE
        assert cumulative[token] > before


def test_grids_and_kernels_follow_from_the_vocabulary() -> None:
    shape = SamplingShape(151_936, "bfloat16", 300, 20, 64)
    steps = [StepShape("decode", n, n) for n in (1, 8, 64)] + [StepShape("prefill", 512, 64)]
    launches = [stateful_sampling_launches(shape, step) for step in steps]
    assert len({launch.kernel for some in launches for launch in some}) == 5
    assert [launch.grid for launch in launches[1]] == [(8, 149, 1)] * 3 + [(8, 1, 1)] * 2
    assert launches[2] == launches[3]
    scratch = stateful_sampling_scratch(shape, steps)
    assert {s.shape[0] for s in scratch} == {64}
    assert sum(64 * int(s.shape[1]) * DTYPE_BYTES[s.dtype] for s in scratch) < 1.05 * 64 * 151_936 * 8
    with pytest.raises(RecipeError, match="1048577 tokens"):
        stateful_sampling_launches(SamplingShape((1 << 20) + 1, "float32", 300, 20, 64), steps[0])


def compiled(spec: KernelSpec, capability: int, fusion: bool) -> Any:
    """What Triton makes of one kernel, without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"float32": "*fp32", "float16": "*fp16", "int32": "*i32", "int64": "*i64"}
    signature = {p.name: kinds[p.dtype] for p in spec.pointers} | {name: "constexpr" for name, _ in spec.constants}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(spec.pointers))}
    source = ASTSource(compiled_form(spec), signature, dict(spec.constants), aligned)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": fusion}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("size", [49_152, 151_936])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_ahead_of_time(capability: int, size: int, tmp_path: Path) -> None:
    """No registers spilled to memory."""
    from triton import knobs

    for launch in stateful_sampling_launches(SamplingShape(size, "float16", 300, 20, 64), StepShape("decode", 8, 8)):
        cubin = tmp_path / launch.kernel.name
        cubin.write_bytes(compiled(launch.kernel, capability, fusion=False).asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert " STACK:0 " in usage, f"{launch.kernel.function}: {usage}"
        assert " LOCAL:0 " in usage, f"{launch.kernel.function}: {usage}"


def test_penalties_are_not_fused_where_the_compiler_may() -> None:
    """A fused multiply-add would round a penalty once where the oracle rounds twice: all of them here add zero."""
    adjust = stateful_sampling_launches(SamplingShape(1000, "float32", 4, 4, 4), StepShape("decode", 1, 1))[0].kernel
    ptx = compiled(adjust, 80, fusion=True).asm["ptx"]
    addends = re.findall(r"fma\.rn\.f32[^;]*, (\S+);", ptx)
    assert set(addends) == {"0f00000000"}
    assert not re.search(r"\bmul\.f32|mul\.rn\.f32|div\.(full|approx)", ptx)

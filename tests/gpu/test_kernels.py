"""Every kernel on a GPU: equal to its oracle, the same bits in any company. Bodies: `kernel_checks`."""

from __future__ import annotations

import pytest

from ostinato.engines.program import StepShape
from ostinato.plugins.paged_attention_launch import paged_attention_launches

from .cases import LONG_CASES, SHORT_CASES, AttentionCase
from .gpu import Gpu
from .kernel_checks import check_attention, check_company, check_feed, check_sampling, check_sampling_company

PHASES = ("decode", "decode", "prefill", "prefill")
SAMPLED = [
    *((97, seed, "float32", 110) for seed in range(4)),
    *((1000, seed, "float32", 40) for seed in range(4)),
    (1000, 6, "float16", 40),
    (1000, 7, "bfloat16", 40),
    *((5003, seed, "float32", 20) for seed in range(3)),
]


def named(case: AttentionCase) -> str:
    return case.name


@pytest.mark.parametrize("case", SHORT_CASES, ids=named)
@pytest.mark.parametrize("seed", range(6))
def test_attention_equals_oracle(gpu: Gpu, case: AttentionCase, seed: int) -> None:
    check_attention(gpu, case, seed, PHASES)


@pytest.mark.parametrize("case", LONG_CASES, ids=named)
def test_attention_over_long_rows_equals_oracle(gpu: Gpu, case: AttentionCase) -> None:
    check_attention(gpu, case, 0, ("decode", "prefill"))
    for launch in paged_attention_launches(case.shape, StepShape("prefill", 32, case.shape.max_rows)):
        assert not gpu.spills(launch.kernel), launch.kernel.function


@pytest.mark.parametrize("case", [*SHORT_CASES, *LONG_CASES], ids=named)
def test_a_row_is_the_same_alone_and_in_company(gpu: Gpu, case: AttentionCase) -> None:
    check_company(gpu, case)


@pytest.mark.parametrize(("size", "seed", "dtype", "count"), SAMPLED)
def test_sampling_equals_oracle(gpu: Gpu, size: int, seed: int, dtype: str, count: int) -> None:
    check_sampling(gpu, size, seed, dtype, count)


def test_sampling_of_a_real_vocabulary_equals_oracle(gpu: Gpu) -> None:
    check_sampling(gpu, 49_152, 0, "float32", 16)


@pytest.mark.parametrize(("size", "count"), [(97, 30), (5003, 12)])
def test_a_row_samples_the_same_alone_in_a_batch_and_between_pads(gpu: Gpu, size: int, count: int) -> None:
    check_sampling_company(gpu, size, count)


@pytest.mark.parametrize("step", [StepShape("decode", 1, 1), StepShape("prefill", 96, 8)], ids=lambda one: one.key)
def test_tokens_are_fed_as_the_oracle_feeds_them(gpu: Gpu, step: StepShape) -> None:
    check_feed(gpu, step)

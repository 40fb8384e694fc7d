"""Figures for the sheet; no time decides a test. Bodies: `measures`, `step_measures`."""

from __future__ import annotations

import pytest

from ostinato.engines.program import StepShape

from . import measures, step_measures
from .cases import MEASURED_ROWS, MEASURED_VOCABULARIES, measured_attention, measured_sampling
from .gpu import Gpu
from .sheet import Sheet
from .stack_program import GPU_STACK


@pytest.fixture(scope="module")
def ceiling(gpu: Gpu, sheet: Sheet) -> float:
    return measures.copy_ceiling(gpu, sheet, min(2 << 30, gpu.device.memory().free // 8))


@pytest.mark.parametrize(
    ("cache_dtype", "rows", "context"),
    [("float16", 1, 4096), ("float16", 1, 32_768), ("float16", 8, 4096), ("float16", 64, 4096),
     ("float8_e4m3", 8, 4096), ("float8_e4m3", 64, 4096)],
)  # fmt: skip
def test_decode_attention(
    gpu: Gpu, sheet: Sheet, ceiling: float, cache_dtype: str, rows: int, context: int
) -> None:  # fmt: skip
    shape = measured_attention(cache_dtype)
    if 4 * rows * context * measures.token_bytes(shape) > gpu.device.memory().free:
        pytest.skip("the GPU's memory does not hold a cache several times its L2")
    measures.decode_attention(gpu, sheet, shape, rows, context, ceiling)


@pytest.mark.parametrize("cache_dtype", ["float16", "float8_e4m3"])
@pytest.mark.parametrize("tokens", [64, 32_768])
def test_cache_write(gpu: Gpu, sheet: Sheet, ceiling: float, cache_dtype: str, tokens: int) -> None:
    measures.cache_write(gpu, sheet, measured_attention(cache_dtype), tokens, ceiling)


@pytest.mark.parametrize(("rows", "length"), [(1, 4096), (8, 1024)])
def test_prefill_attention_beside_torch(
    gpu: Gpu, sheet: Sheet, rows: int, length: int, request: pytest.FixtureRequest
) -> None:  # fmt: skip
    shape = measured_attention("float16")
    ours = measures.prefill_attention(gpu, sheet, shape, rows, length)
    request.getfixturevalue("torch_on_gpu")
    measures.torch_prefill(gpu, sheet, shape, rows, length, ours)


@pytest.mark.parametrize("rows", MEASURED_ROWS)
@pytest.mark.parametrize("vocab_size", MEASURED_VOCABULARIES)
def test_sampling(gpu: Gpu, sheet: Sheet, rows: int, vocab_size: int) -> None:
    for kind in ("greedy", "truncated"):
        measures.sampling(gpu, sheet, measured_sampling(vocab_size), rows, kind)


@pytest.mark.parametrize("num_nodes", [1, 10, 100, 300, 1000])
def test_graph_launches(gpu: Gpu, sheet: Sheet, num_nodes: int) -> None:
    step_measures.launch_cost(gpu, sheet, num_nodes)


@pytest.mark.parametrize("rows", [1, 64])
def test_uploads(gpu: Gpu, sheet: Sheet, rows: int) -> None:
    step_measures.upload_cost(gpu, sheet, GPU_STACK, StepShape("decode", rows, rows))


@pytest.mark.usefixtures("torch_on_gpu")
def test_step_times(gpu: Gpu, sheet: Sheet) -> None:
    step_measures.step_times(gpu, sheet, GPU_STACK, context=512, count=21)


@pytest.mark.usefixtures("torch_on_gpu")
def test_overlap(gpu: Gpu, sheet: Sheet) -> None:
    step_measures.overlap(gpu, sheet, GPU_STACK, context=512, count=40)

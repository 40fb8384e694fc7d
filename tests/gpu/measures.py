"""What the GPU path costs on this GPU, each figure beside its ceiling or its peer (in tests)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.io_table import QUANTIZED_CACHES, SCALE_BYTES, device_cache_shape
from ostinato.engines.program import StepShape
from ostinato.plugins.kernel_launch import Launch
from ostinato.plugins.operator_shapes import AttentionShape, SamplingShape
from ostinato.plugins.paged_attention_launch import paged_attention_launches, paged_attention_scratch
from ostinato.plugins.stateful_sampling_launch import stateful_sampling_launches, stateful_sampling_scratch
from tests.interpreter import scratch_arrays
from tests.sampling_steps import plain_step

from .gpu import Gpu, Tensors, dtype_of
from .sheet import Sheet

Array = NDArray[Any]
COLD_BYTES = 512 << 20  # several times any L2: what a repeat reads, the one before has not left there
HALF_ONES = 0x3C  # both bytes of a float16 near 1


def copy_ceiling(gpu: Gpu, sheet: Sheet, num_bytes: int) -> float:
    """Bytes a second, read and written, of a device's own large copy."""
    source, target = (gpu.device.allocate(num_bytes, "the copy ceiling") for _ in range(2))
    gpu.stream.fill(source.address, HALF_ONES, num_bytes)
    seconds = gpu.seconds(lambda _: gpu.stream.copy(target.address, source.address, num_bytes), 8)
    target.close()
    source.close()
    sheet.add("device copy", 2 * num_bytes / seconds / 1e12, "TB/s", bytes=num_bytes)
    return 2 * num_bytes / seconds


class Cache:
    """A pool of blocks of one layer, far larger than L2, and block tables that walk through it."""

    def __init__(self, gpu: Gpu, shape: AttentionShape, num_bytes: int) -> None:
        a = shape.attributes
        lines = [dim for dim in device_cache_shape(shape.cache_dtype, a.num_kv_heads, shape.block_size, a.head_size)
                 if isinstance(dim, int)]  # fmt: skip
        item = 1 if shape.cache_dtype in QUANTIZED_CACHES else dtype_of(shape.cache_dtype).itemsize
        self.block_bytes = int(np.prod(lines)) * item
        self.num_blocks = max(num_bytes // 2 // self.block_bytes, 2)
        size = self.num_blocks * self.block_bytes
        self._memory = [gpu.device.allocate(size, "a measured cache") for _ in range(2)]
        for memory in self._memory:
            gpu.stream.fill(memory.address, HALF_ONES, size)
        self.addresses = dict(zip(("key_cache", "value_cache"), (one.address for one in self._memory), strict=True))
        self.sizes = {one.address: size for one in self._memory}

    def tables(self, shape: AttentionShape, rows: int, tokens: int) -> Array:
        """[sets, rows, P]: as many sets of rows as there is room for, each over blocks of its own."""
        each = -(-tokens // shape.block_size)
        sets = max(1, (self.num_blocks - 1) // (rows * each))
        order = np.random.default_rng(1).permutation(np.arange(1, self.num_blocks))
        order = np.resize(order, sets * rows * each).reshape(sets, rows, each).astype(np.int32)
        tables = np.zeros((sets, rows, shape.table_width), np.int32)
        tables[..., :each] = order
        return tables

    def close(self) -> None:
        for memory in self._memory:
            memory.close()


def decode_attention(gpu: Gpu, sheet: Sheet, shape: AttentionShape, rows: int, context: int, ceiling: float) -> None:
    """Splits and join over `rows` rows with `context` tokens each: bytes of keys and values a second."""
    step = StepShape("decode", rows, rows)
    launches = paged_attention_launches(shape, step)[1:]
    cache = Cache(gpu, shape, max(COLD_BYTES, 3 * rows * context * token_bytes(shape)))
    arrays = _step_arrays(shape, step, [1] * rows, [context - 1] * rows)
    seconds = _attention_seconds(gpu, shape, launches, arrays, cache, cache.tables(shape, rows, context))
    moved = rows * context * token_bytes(shape)
    sheet.add("decode attention", moved / seconds / 1e12, "TB/s", cache=shape.cache_dtype, rows=rows, context=context,
              us=seconds * 1e6, of_copy=moved / seconds / ceiling)  # fmt: skip


def cache_write(gpu: Gpu, sheet: Sheet, shape: AttentionShape, tokens: int, ceiling: float) -> None:
    """Keys and values of `tokens` new tokens into the cache: bytes read and written a second."""
    step = StepShape("decode", tokens, tokens)
    launch = paged_attention_launches(replace(shape, max_rows=tokens), step)[:1]
    cache = Cache(gpu, shape, max(COLD_BYTES, 3 * tokens * token_bytes(shape)))
    arrays = _step_arrays(shape, step, [1] * tokens, [0] * tokens)
    order = np.random.default_rng(1).permutation(np.arange(1, cache.num_blocks))
    blocks = np.resize(order, -(-tokens // shape.block_size))
    at = np.arange(tokens)
    arrays["slot_mapping"] = (blocks[at // shape.block_size] * shape.block_size + at % shape.block_size).astype(
        np.int32
    )
    seconds = _attention_seconds(gpu, shape, launch, arrays, cache, np.zeros((1, 1, 1), np.int32))
    a, item = shape.attributes, dtype_of(shape.dtype).itemsize
    moved = tokens * (2 * a.num_kv_heads * a.head_size * item + token_bytes(shape))
    sheet.add("cache write", moved / seconds / 1e12, "TB/s", cache=shape.cache_dtype, tokens=tokens,
              us=seconds * 1e6, of_copy=moved / seconds / ceiling)  # fmt: skip


def prefill_attention(gpu: Gpu, sheet: Sheet, shape: AttentionShape, rows: int, length: int) -> float:
    """Whole prompts: floating-point operations a second; returns the seconds of one."""
    step = StepShape("prefill", rows * length, rows)
    shape = replace(shape, max_rows=rows)
    launches = paged_attention_launches(shape, step)
    cache = Cache(gpu, shape, 3 * rows * length * token_bytes(shape))
    tables = cache.tables(shape, rows, length)[:1]
    arrays = _step_arrays(shape, step, [length] * rows, [0] * rows)
    at = np.arange(length)
    slots = tables[0][:, at // shape.block_size] * shape.block_size + at % shape.block_size
    arrays["slot_mapping"] = slots.reshape(-1).astype(np.int32)
    seconds = _attention_seconds(gpu, shape, launches, arrays, cache, tables)
    sheet.add("prefill attention", prefill_flops(shape, rows, length) / seconds / 1e12, "TFLOP/s",
              cache=shape.cache_dtype, rows=rows, length=length, us=seconds * 1e6)  # fmt: skip
    return seconds


def torch_prefill(gpu: Gpu, sheet: Sheet, shape: AttentionShape, rows: int, length: int, ours: float) -> None:
    """The same prompts through torch's scaled_dot_product_attention, which reads no pages."""
    import torch

    a = shape.attributes
    made: list[Any] = []

    def make() -> None:
        generator = torch.Generator(gpu.torch_device()).manual_seed(1)
        for heads in (a.num_q_heads, a.num_kv_heads, a.num_kv_heads):
            size = (rows, heads, length, a.head_size)
            random = torch.randn(size, generator=generator, device=gpu.torch_device())
            made.append(random.to(getattr(torch, shape.dtype)))

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(*made, is_causal=True, enable_gqa=True)

    gpu.submit(gpu.stream, make)
    seconds = gpu.seconds(lambda _: gpu.submit(gpu.stream, attend), 10, captured=False)
    sheet.add("torch sdpa prefill", prefill_flops(shape, rows, length) / seconds / 1e12, "TFLOP/s", rows=rows,
              length=length, us=seconds * 1e6, ours_to_it=seconds / ours)  # fmt: skip


def sampling(gpu: Gpu, sheet: Sheet, shape: SamplingShape, rows: int, kind: str) -> None:
    """All kernels of one step's sampling. `kind`: greedy, or truncated with logprobs and penalties."""
    form = StepShape("decode", rows, rows)
    logits = np.random.default_rng(2).standard_normal((rows, shape.vocab_size), np.float32) * 3
    chosen: dict[str, Any] = {"temperature": 0.0}
    if kind == "truncated":
        chosen = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "num_logprobs": 5, "repetition": 1.1}
    arrays: dict[str, Array] = dict(plain_step(logits, shape.max_bias, shape.num_logprobs, **chosen))
    arrays["counts_out"] = arrays.pop("counts")
    slots = shape.num_logprobs
    arrays |= {"tokens": np.zeros(rows, np.int32), "logprobs": np.zeros(rows, np.float32)}
    arrays |= {"top_ids": np.zeros((rows, slots), np.int32), "top_logprobs": np.zeros((rows, slots), np.float32)}
    arrays |= scratch_arrays(stateful_sampling_scratch(shape, [form]))
    launches = stateful_sampling_launches(shape, form)
    gpu.prepare(launch.kernel for launch in launches)
    with gpu.put(arrays) as tensors:
        addresses = {**tensors.addresses, "counts": tensors.addresses["counts_out"]}
        seconds = gpu.seconds(lambda _: gpu.launch(launches, addresses), 20)
    sheet.add("sampling", seconds * 1e6, "us", rows=rows, vocabulary=shape.vocab_size, kind=kind)


def token_bytes(shape: AttentionShape) -> int:
    """Of one token's key and value in the cache."""
    a = shape.attributes
    quantized = shape.cache_dtype in QUANTIZED_CACHES
    head = a.head_size + SCALE_BYTES if quantized else a.head_size * dtype_of(shape.cache_dtype).itemsize
    return 2 * a.num_kv_heads * head


def prefill_flops(shape: AttentionShape, rows: int, length: int) -> float:
    """Two products over the causal half."""
    a = shape.attributes
    return 4.0 * rows * a.num_q_heads * a.head_size * length * (length + 1) / 2


def _step_arrays(shape: AttentionShape, step: StepShape, new: list[int], cached: list[int]) -> dict[str, Array]:
    a, rng, dtype = shape.attributes, np.random.default_rng(3), dtype_of(shape.dtype)
    arrays: dict[str, Array] = {
        name: _random(rng, (step.tokens, heads * a.head_size)).astype(dtype)
        for name, heads in (("q", a.num_q_heads), ("k", a.num_kv_heads), ("v", a.num_kv_heads))
    }
    arrays["out"] = np.zeros_like(arrays["q"])
    arrays["slot_mapping"] = np.zeros(step.tokens, np.int32)
    arrays["query_starts"] = np.cumsum([0, *new]).astype(np.int32)
    arrays["context_lens"] = np.array(cached, np.int32)
    return arrays


def _random(rng: np.random.Generator, size: tuple[int, int]) -> Array:
    """A million numbers, over and over."""
    return np.resize(rng.standard_normal(min(size[0] * size[1], 1 << 20), np.float32), size)


def _attention_seconds(
    gpu: Gpu, shape: AttentionShape, launches: tuple[Launch, ...], arrays: Mapping[str, Array], cache: Cache,
    tables: Array,
) -> float:  # fmt: skip
    """One repeat after another over the next set of tables."""
    needed = {pointer.name for launch in launches for pointer in launch.kernel.pointers}
    scratch = paged_attention_scratch(shape, [StepShape("decode", (rows := len(arrays["context_lens"])), rows)])
    given = {**arrays, **(scratch_arrays(scratch) if "split_best" in needed else {})}
    names = [f"block_tables.{number}" for number in range(len(tables))]
    gpu.prepare(launch.kernel for launch in launches)
    given = {name: array for name, array in given.items() if name in needed}
    with gpu.put({**given, **dict(zip(names, tables, strict=True))}) as tensors:
        _see(gpu, tensors, cache)

        def record(number: int) -> None:
            table = {"block_tables": tensors.addresses[names[number % len(names)]]}
            gpu.launch(launches, {**tensors.addresses, **cache.addresses, **table})

        seconds = gpu.seconds(record, 20)
    cache.close()
    return seconds


def _see(gpu: Gpu, tensors: Tensors, cache: Cache) -> None:
    gpu.see({**tensors.sizes, **cache.sizes})

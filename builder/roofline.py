"""Rooflines: what a step and an operator must move and compute at least, and what our kernels move (offline).

A time is a bound: max(bytes / bandwidth, operations / peak) plus bytes over the link; what it takes to start kernels
and messages is not in it. Sources: data sheets (`gpus`). Model: Williams, Waterman and Patterson, "Roofline" (2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ostinato.engines.program import DTYPE_BYTES, StepShape
from ostinato.engines.recipe import Recipe
from ostinato.engines.shards import Shard
from ostinato.engines.sizes import ModelSizes
from ostinato.plugins.paged_attention_launch import used_splits

from .config import DecoderConfig
from .gpus import Gpu
from .memory_plan import parameter_bytes
from .rank_operators import RankOperators, rank_operators, slot_bytes
from .shard import vocab_rows, weight_slices

_F32 = 4


@dataclass(frozen=True)
class Work:
    """Of one rank and step. `link_bytes`: what a rank sends to others."""

    num_bytes: int
    operations: int
    link_bytes: int


@dataclass(frozen=True)
class StepPrediction:
    """Milliseconds of one step over all pipeline stages, one after another."""

    key: str
    memory_ms: float
    compute_ms: float
    link_ms: float
    total_ms: float


def predict_step(config: DecoderConfig, recipe: Recipe, gpu: Gpu, step: StepShape, context: int) -> StepPrediction:
    """`context`: tokens cached before the step, of each row in a decode step; a prefill step starts its one row."""
    peak = gpu.float_flops if recipe.weights == "float32" else gpu.half_flops
    memory = compute = link = total = 0.0
    shards = recipe.shards
    for stage in range(shards.pipeline_parallel):
        work = step_work(config, recipe, shards.shard(stage * shards.tensor_parallel), step, context)
        moving, computing, sending = work.num_bytes / gpu.bandwidth, work.operations / peak, work.link_bytes / gpu.link
        memory, compute, link = memory + moving, compute + computing, link + sending
        total += max(moving, computing) + sending
    return StepPrediction(step.key, 1e3 * memory, 1e3 * compute, 1e3 * link, 1e3 * total)


def step_work(config: DecoderConfig, recipe: Recipe, shard: Shard, step: StepShape, context: int) -> Work:
    """Every weight but the embedding is read once; a row of it, and of the hidden state, once a token."""
    operators = rank_operators(config.sizes, recipe, shard)
    sizes, width = operators.sizes, DTYPE_BYTES[recipe.weights]
    num_bytes = operations = 0
    for name, part in weight_slices(config, shard).items():
        if name == "embedding.weight" and not (config.tied and shard.is_last_stage):
            continue
        num_bytes += math.prod(part.shape) * parameter_bytes(name, recipe.weights)
        is_head = name in ("head.weight", "embedding.weight")
        if len(part.shape) == 2:
            operations += 2 * math.prod(part.shape) * (step.rows if is_head else step.tokens)
    attention = attention_traffic(operators, recipe, step, context)
    num_bytes += sizes.num_layers * attention.needed_bytes + step.tokens * sizes.hidden_size * (width + 2 * _F32)
    operations += sizes.num_layers * attention.operations
    if shard.is_last_stage:
        num_bytes += step.rows * config.sizes.vocab_size * 2 * _F32  # logits, written and read
    return Work(num_bytes, operations, _link_bytes(sizes, config.sizes, shard, step))


def _link_bytes(sizes: ModelSizes, model: ModelSizes, shard: Shard, step: StepShape) -> int:
    """Two sums a layer and one of the embedding, the gathered logits, and the hidden state for the next stage.

    A sum over n ranks costs each 2 (n - 1) / n of its bytes (ring), gathering n - 1 times a rank's own part.
    """
    parts = shard.tensor_parallel
    hidden = step.tokens * sizes.hidden_size * _F32
    sums = 2 * sizes.num_layers + shard.is_first_stage
    total = 2 * (parts - 1) * sums * hidden // parts
    if shard.is_last_stage:
        return total + (parts - 1) * step.rows * vocab_rows(model, shard) * _F32
    return total + hidden


@dataclass(frozen=True)
class Traffic:
    """One call of an operator. `needed_bytes`: each number once. `moved_bytes`: what all programs ask for together."""

    needed_bytes: int
    moved_bytes: int
    operations: int

    @property
    def ratio(self) -> float:
        return self.moved_bytes / self.needed_bytes


def attention_traffic(operators: RankOperators, recipe: Recipe, step: StepShape, context: int) -> Traffic:
    """PagedAttention over `context` cached tokens a row, or over one row of a prefill step without any.

    Needed: q, k, v and out, the new slots written, the cached slots read. Moved besides, by kernel:
      decode_splits, decode_join   q again for every split that holds keys; best, weight and total of each, both ways
      prefill_attention            keys and values again for every tile of queries that sees them
    Chip caches serve part of the repeats. Indexes and scales of a model's own are too small to count.
    """
    sizes, limits = operators.sizes, recipe.limits
    width, slot = DTYPE_BYTES[recipe.weights], slot_bytes(recipe.kv_cache, sizes.head_size)
    q_row, kv_row = sizes.num_q_heads * sizes.head_size * width, sizes.num_kv_heads * sizes.head_size * width
    kv_slot = 2 * sizes.num_kv_heads * slot
    own = step.tokens * (2 * q_row + 2 * kv_row + kv_slot)
    window = sizes.sliding_window or limits.max_context
    launches = {launch.kernel.function: launch for launch in operators.launches(step)["PagedAttention"]}
    if step.phase == "decode":
        seen = min(context + 1, window)
        splits = used_splits(operators.attention, context)
        partial = sizes.num_q_heads * (sizes.head_size + 2) * _F32
        again = (splits - 1) * q_row + 2 * splits * partial + kv_slot  # its own key is read back
        needed = own + step.rows * (seen - 1) * kv_slot
        pairs = step.rows * seen
        return Traffic(needed, needed + step.rows * again, 4 * sizes.num_q_heads * sizes.head_size * pairs)
    constants = dict(launches["prefill_attention"].kernel.constants)
    lines, group = constants["lines"], constants["group"]
    assert isinstance(lines, int)
    assert isinstance(group, int)
    tile = lines // group
    read = sum(min(begin + tile, step.tokens) - max(0, begin - window + 1) for begin in range(0, step.tokens, tile))
    pairs = sum(min(token + 1, window) for token in range(step.tokens))
    return Traffic(own, own + read * kv_slot, 4 * sizes.num_q_heads * sizes.head_size * pairs)


def sampling_traffic(operators: RankOperators, step: StepShape) -> Traffic:
    """StatefulSampling of rows that truncate and have a mask, without penalties.

    Needed: the logits and the mask once. Moved, by kernel and row, with V logits, W mask words, G groups, N blocks:
      adjust_logits     4V + 4W read, 4V + 16G written
      weigh_blocks      4V + 4W, and each of N programs reads 16G
      pack_candidates   4V + 4W
      draw_tokens, report_logprobs   16G and 8G, and the few candidates, which are not counted
    Operations are comparisons and sums: not a bound.
    """
    shape = operators.sampling
    assert shape is not None, "this rank samples nothing"
    launches = {launch.kernel.function: launch for launch in operators.launches(step)["StatefulSampling"]}
    groups = dict(launches["adjust_logits"].kernel.constants)["num_groups"]
    blocks = dict(launches["weigh_blocks"].kernel.constants)["num_blocks"]
    assert isinstance(groups, int)
    assert isinstance(blocks, int)
    logits, mask = 4 * shape.vocab_size, 4 * -(-shape.vocab_size // 32)
    moved = 4 * logits + 3 * mask + 16 * groups + blocks * 16 * groups + 24 * groups
    return Traffic(step.rows * (logits + mask), step.rows * moved, 0)

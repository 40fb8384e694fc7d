"""Whether a build fits a GPU, by arithmetic on sizes, before any weight is read (offline).

    GPU memory × 0.9 ─┬─ weights ─ state ─ scratch ─ activations of the largest step ─ graphs
                      └─ the rest ÷ bytes of a block = blocks = tokens = rows at the longest context

The tenth that is left out holds the CUDA context, loaded code and NCCL's buffers. Weights, KV blocks, state, scratch
and the tensors between calls are exact; what an engine needs inside, and a graph, are estimates (see the functions).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ostinato.engines.io_table import DEVICE_SAMPLING_INPUTS, OUTPUTS, STATE_INPUTS, Tensor, feed_inputs, step_inputs
from ostinato.engines.memory_table import MemoryTable
from ostinato.engines.program import DTYPE_BYTES, StepShape
from ostinato.engines.recipe import Recipe
from ostinato.engines.shards import Shard
from ostinato.engines.sizes import MAX_LOGIT_BIAS, MAX_LOGPROBS, Limits, ModelSizes

from .config import DecoderConfig
from .gpus import Gpu
from .rank_operators import RankOperators, block_bytes, rank_operators, tensor_bytes
from .shard import vocab_rows, weight_slices

USABLE = 0.9
# A guess until it is measured: kernels of a layer in a step's graph, and what the driver keeps for each.
_NODES_PER_LAYER, _NODE_BYTES = 24, 8 << 10
_F32 = 4


@dataclass(frozen=True)
class Fit:
    """What a GPU has left for KV blocks beside everything else of the rank that takes most."""

    memory: MemoryTable
    usable_bytes: int
    blocks: int
    limits: Limits

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0

    @property
    def missing_bytes(self) -> int:
        """How much more than the GPU has the limits ask for; negative is room to spare."""
        return self.memory.total_bytes - self.usable_bytes

    @property
    def tokens(self) -> int:
        """Tokens that the blocks hold, without the null block."""
        return max(0, self.blocks - 1) * self.limits.block_size

    @property
    def rows_at_max_context(self) -> int:
        return max(0, self.blocks - 1) // self.limits.max_blocks_per_row


def memory_table(config: DecoderConfig, recipe: Recipe) -> MemoryTable:
    """Of the rank that takes most. Raises BuildError where the model can't be cut as the recipe says."""
    shards = recipe.shards
    stages = [shards.shard(stage * shards.tensor_parallel) for stage in range(shards.pipeline_parallel)]
    return max((rank_memory(config, recipe, shard) for shard in stages), key=lambda table: table.total_bytes)


def rank_memory(config: DecoderConfig, recipe: Recipe, shard: Shard) -> MemoryTable:
    """One rank's table; the slices of a stage are alike."""
    operators = rank_operators(config.sizes, recipe, shard)
    sizes, limits = operators.sizes, recipe.limits
    return MemoryTable(
        weight_bytes=weight_bytes(config, recipe, shard),
        kv_bytes_per_block=block_bytes(sizes, recipe),
        state_bytes=_state_bytes(config.sizes, limits) if shard.is_last_stage else 0,
        scratch_bytes=operators.scratch_bytes,
        activation_bytes={
            step.key: io_bytes(config.sizes, limits, shard, step)
            + cut_bytes(operators, config.sizes, recipe, shard, step)
            + engine_bytes(operators, config.sizes, recipe, shard, step)
            for step in operators.steps
        },
        graph_reserve_bytes=len(operators.steps) * sizes.num_layers * _NODES_PER_LAYER * _NODE_BYTES,
        num_blocks=limits.num_blocks,
    )


def fit(memory: MemoryTable, limits: Limits, gpu: Gpu) -> Fit:
    usable = int(gpu.memory_bytes * USABLE)
    return Fit(memory, usable, max(0, usable - memory.fixed_bytes) // memory.kv_bytes_per_block, limits)


def weight_bytes(config: DecoderConfig, recipe: Recipe, shard: Shard) -> int:
    """Every parameter of the rank once, and its two rope tables in float32."""
    rope = 2 * recipe.limits.max_context * config.sizes.head_size * _F32
    return rope + sum(
        math.prod(part.shape) * parameter_bytes(name, recipe.weights)
        for name, part in weight_slices(config, shard).items()
    )


def parameter_bytes(name: str, weights: str) -> int:
    """Bytes of one number: linear layers, embedding and head in the recipe's precision, norms and biases float32."""
    return DTYPE_BYTES[weights] if name.endswith(".weight") and "norm" not in name else _F32


def _state_bytes(sizes: ModelSizes, limits: Limits) -> int:
    """Counts and biases of every line."""
    return tensor_bytes(STATE_INPUTS, {"R": limits.num_state_lines, "V": sizes.vocab_size, "M": MAX_LOGIT_BIAS})


def io_bytes(sizes: ModelSizes, limits: Limits, shard: Shard, step: StepShape) -> int:
    """What a step uploads, or takes from the stage before, and gives back, or to the stage after."""
    hidden = Tensor("hidden", "float32", ("T", sizes.hidden_size), "output")
    others = (*DEVICE_SAMPLING_INPUTS, *OUTPUTS) if shard.is_last_stage else (hidden,)
    symbols = {
        "T": step.tokens, "B": step.rows, "B+1": step.rows + 1, "S": step.rows, "P": limits.max_blocks_per_row,
        "W": -(-sizes.vocab_size // 32), "V": sizes.vocab_size, "K": MAX_LOGPROBS,
    }  # fmt: skip
    return tensor_bytes((*step_inputs(sizes, shard), *feed_inputs(shard), *others), symbols)


def cut_bytes(operators: RankOperators, model: ModelSizes, recipe: Recipe, shard: Shard, step: StepShape) -> int:
    """Tensors between calls: q, k, v and attention's output in the recipe's precision, all else in float32.

    The hidden state twice, read and written (a later stage may save one), cosines and sines, logits; with several
    slices also what one gives to a sum and what comes back, and its own and the gathered logits.
    """
    sizes, parts = operators.sizes, shard.tensor_parallel
    heads = 2 * sizes.num_q_heads + 2 * sizes.num_kv_heads
    a_token = 2 * sizes.hidden_size * _F32 + 2 * sizes.head_size * _F32
    a_token += heads * sizes.head_size * DTYPE_BYTES[recipe.weights]
    a_row = model.vocab_size * _F32 if shard.is_last_stage else 0
    if parts > 1:
        a_token += 2 * sizes.hidden_size * _F32
        a_row += (1 + parts) * vocab_rows(model, shard) * _F32 if shard.is_last_stage else 0
    return step.tokens * a_token + step.rows * a_row


def engine_bytes(operators: RankOperators, model: ModelSizes, recipe: Recipe, shard: Shard, step: StepShape) -> int:
    """An estimate of what an engine needs inside at its widest place: the MLP, or the head.

    MLP: the normed input, gate and up, their product; in half precision each also in float32, as none were fused.
    Head: the normed input and the logits, likewise.
    """
    width = DTYPE_BYTES[recipe.weights]
    both = _F32 if width == _F32 else width + _F32
    sizes = operators.sizes
    mlp = step.tokens * both * (sizes.hidden_size + 3 * sizes.intermediate_size)
    head = step.rows * both * (sizes.hidden_size + vocab_rows(model, shard)) if shard.is_last_stage else 0
    return max(mlp, head)

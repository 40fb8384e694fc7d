"""Exports every rank of a checkpoint and drives the ranks in lockstep over paged caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.builder import passes
from ostinato.builder.checkpoint import Checkpoint
from ostinato.builder.export import for_rank, stage_onnx
from ostinato.builder.quantize import store_weights
from ostinato.builder.weights import parameters_of, write_model
from ostinato.engines.io_table import cache_inputs, rank_inputs, rank_outputs
from ostinato.engines.shards import Shards
from ostinato.engines.sizes import ModelSizes
from ostinato.plugins.collectives_onnx import all_gather_function, all_reduce_function
from ostinato.plugins.fused_sampling_onnx import fused_sampling_function
from ostinato.plugins.paged_attention_onnx import paged_attention_function

from ..lockstep import Lockstep
from .paged_runner import PagedRequests, garbage_caches, neutral_sampling

ROPE_ROWS = 96
NUM_BLOCKS = 48


class ShardRunner:
    """All ranks of one checkpoint. `folders`: what `write_ranks` gave."""

    def __init__(self, sizes: ModelSizes, shards: Shards, folders: Sequence[Path], *, block_size: int) -> None:
        self.sizes = sizes
        self.lockstep = Lockstep(shards, folders)
        self.requests = PagedRequests(block_size, NUM_BLOCKS)
        self.caches = [garbage_caches(cache_inputs(sizes, block_size, shard), NUM_BLOCKS) for shard in shards.all()]

    def step(self, rows: list[tuple[int, list[int]]]) -> dict[str, Any]:
        """One step, as `PagedRunner.step`."""
        feeds = self.requests.feeds(rows)
        feeds |= neutral_sampling(len(feeds["input_ids"]), self.sizes.vocab_size)
        return self.lockstep.run(feeds, self.caches)


def write_ranks(checkpoint: Checkpoint, shards: Shards, folder: Path, block_size: int) -> list[Path]:
    """model.onnx and float32 weights of every rank, as a build makes them; each stage is traced once."""
    sizes = checkpoint.config.sizes
    functions = (paged_attention_function, fused_sampling_function, all_reduce_function, all_gather_function)
    folders = []
    for shard in shards.all():
        if shard.tp_rank == 0:
            stage = passes.fold_constants(stage_onnx(checkpoint.config, block_size, ROPE_ROWS, shard))
        model = passes.name_interface(
            for_rank(stage, checkpoint.config, shard),
            rank_inputs(sizes, block_size, shard),
            rank_outputs(sizes, block_size, shard),
        )
        model = passes.drop_notes(passes.name_values(model))
        model = passes.attach_functions(model, [function() for function in functions])
        model = store_weights(model, parameters_of(checkpoint, ROPE_ROWS, shard), "float32")
        folders.append(folder / f"rank{shard.rank}")
        folders[-1].mkdir(parents=True)
        write_model(model, folders[-1], lambda _: None)
    return folders

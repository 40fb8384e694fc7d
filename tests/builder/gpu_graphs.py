"""Tiny checkpoints as graphs for GPU targets, cut and with their program; each model is traced once (in tests)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ostinato.builder.checkpoint import Checkpoint
from ostinato.builder.cut import Cut, cut_at_operators
from ostinato.builder.half import Arrays
from ostinato.builder.launch_plan import attention_attributes, plan_launches
from ostinato.builder.pipeline import read_checkpoint
from ostinato.builder.program_writer import write_program
from ostinato.builder.rank_graph import StageGraphs, device_graph
from ostinato.builder.segment_names import with_engine_names
from ostinato.builder.weights import parameters_of
from ostinato.engines.program import Program
from ostinato.engines.recipe import Recipe
from ostinato.engines.shards import WHOLE, Shard, Shards
from ostinato.plugins.paged_attention import AttentionAttributes

from ..tiny import write_tiny
from .conftest import LIMITS

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "llama untied, biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "mistral window 8": ("mistral", {"sliding_window": 8}),
    "qwen3 wide heads": ("qwen3", {"head_dim": 32}),
}


def gpu_recipe(checkpoint: Path, weights: str, kv_cache: str = "", **changes: Any) -> Recipe:
    recipe = Recipe(
        "tiny", str(checkpoint), "rtx", weights, kv_cache or weights, LIMITS, compute_capabilities=("8.6", "12.0")
    )
    return replace(recipe, **changes)


@dataclass(frozen=True)
class RankGraph:
    """A rank's graph in a recipe's precisions, and what is made of it."""

    recipe: Recipe
    checkpoint: Checkpoint
    model: ir.Model
    parameters: Arrays
    cut: Cut
    program: Program

    @property
    def attributes(self) -> AttentionAttributes:
        return attention_attributes(next(node for node in self.cut.operators if node.op_type == "PagedAttention"))


class GpuGraphs:
    """`checkpoint` paths and traced graphs, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stages: dict[tuple[str, Shards], StageGraphs] = {}

    def checkpoint(self, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            architecture, overrides = MODELS[name]
            write_tiny(path, architecture, **overrides)
        return path

    def traced(self, name: str, shard: Shard = WHOLE) -> ir.Model:
        shards = Shards(shard.tensor_parallel, shard.pipeline_parallel)
        if (name, shards) not in self._stages:
            path = self.checkpoint(name)
            recipe = gpu_recipe(path, "float32", shards=shards)
            self._stages[name, shards] = StageGraphs(read_checkpoint(path).config, recipe)
        return self._stages[name, shards].graph(shard)

    def rank(
        self, name: str, weights: str, kv_cache: str = "", shard: Shard = WHOLE, *, share_all: bool = False
    ) -> RankGraph:
        path = self.checkpoint(name)
        checkpoint = read_checkpoint(path)
        recipe = gpu_recipe(path, weights, kv_cache)
        made = parameters_of(checkpoint, LIMITS.max_context, shard)
        model, parameters = device_graph(self.traced(name, shard), checkpoint.config, recipe, shard, made)
        return rank_of(recipe, checkpoint, model, parameters, share_all=share_all)


def rank_of(
    recipe: Recipe, checkpoint: Checkpoint, model: ir.Model, parameters: Arrays, *, share_all: bool = False
) -> RankGraph:
    cut = with_engine_names(cut_at_operators(model, parameters.keys(), share_all=share_all))
    plan = plan_launches(cut.operators, recipe)
    offsets = {value.name: 0 for value in cut.shared}
    program = write_program(cut, plan, {}, offsets, recipe.limits.max_blocks_per_row)
    return RankGraph(recipe, checkpoint, model, parameters, cut, program)

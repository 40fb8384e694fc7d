"""One rank's graph on its way from the decoder to what a target compiles (offline)."""

from __future__ import annotations

import onnx_ir as ir

from ostinato.engines.io_table import rank_inputs, rank_outputs
from ostinato.engines.recipe import Recipe
from ostinato.engines.shards import Shard
from ostinato.plugins.collectives_onnx import all_gather_function, all_reduce_function
from ostinato.plugins.fused_sampling_onnx import fused_sampling_function
from ostinato.plugins.paged_attention_onnx import paged_attention_function

from . import passes
from .config import DecoderConfig
from .device_sampling import sample_on_device
from .export import for_rank, stage_onnx
from .half import Arrays, use_half
from .weights import Parameters


class StageGraphs:
    """Traces each pipeline stage once: the graphs of its ranks are copies."""

    def __init__(self, config: DecoderConfig, recipe: Recipe) -> None:
        self._config, self._recipe = config, recipe
        self._traced: tuple[int, ir.Model] | None = None  # ranks come stage by stage

    def graph(self, shard: Shard) -> ir.Model:
        """The rank's graph as traced; parameters are graph inputs without data, after the others."""
        limits = self._recipe.limits
        if self._traced is None or self._traced[0] != shard.stage:
            self._traced = shard.stage, stage_onnx(self._config, limits.block_size, limits.max_context, shard)
        return for_rank(self._traced[1], self._config, shard)


def portable_graph(model: ir.Model, config: DecoderConfig, block_size: int, shard: Shard) -> ir.Model:
    """Named by the I/O table, with a body for every operator of ours: it runs wherever standard operators do."""
    model = _named(model, config, block_size, shard)
    model = passes.drop_notes(model)
    bodies = paged_attention_function, fused_sampling_function, all_reduce_function, all_gather_function
    return passes.attach_functions(model, [body() for body in bodies])


def device_graph(
    model: ir.Model, config: DecoderConfig, recipe: Recipe, shard: Shard, parameters: Parameters
) -> tuple[ir.Model, Arrays]:
    """Named, with the shape of every value in the table's symbols, sampling in its device form, in the recipe's
    precisions.

    Returns the graph, whose parameters are still graph inputs, and every parameter in its stored type.
    """
    model = passes.fold_constants(model)
    inputs = rank_inputs(config.sizes, recipe.limits.block_size, shard)
    shapes = passes.named_shapes(model, inputs)
    model = _named(model, config, recipe.limits.block_size, shard)
    for value, shape in shapes.items():
        value.shape = shape
    model = passes.drop_notes(sample_on_device(model))
    return use_half(model, parameters, recipe.weights, recipe.kv_cache)


def _named(model: ir.Model, config: DecoderConfig, block_size: int, shard: Shard) -> ir.Model:
    model = passes.fold_constants(model)
    inputs, outputs = (table(config.sizes, block_size, shard) for table in (rank_inputs, rank_outputs))
    return passes.name_values(passes.name_interface(model, inputs, outputs))
